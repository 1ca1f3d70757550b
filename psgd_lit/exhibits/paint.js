// Paint the Hessian of a layer with 2 outputs and 4 inputs, and each form of P fits it: who comes closest to |H|^-1?
import { falling, fit, identity, inverse, kron, PATTERNS, product, spectrum, spread, step, transpose } from "./algebra.js";
import { add, agree, choice, difference, inks, mount, normals, note, put, sheet, stroke, tell, watch } from "./kit.js";

const N = 8,
  UPDATES = 150,
  MOST = 4; // the axis of the ranking ends at 10^4
const RATES = falling(UPDATES);
const { triangle: T, diagonal: D, column: C } = PATTERNS;
const FORMS = {
  // the words, the free entries of Q, and how it is learned
  dense: { words: "dense", entries: 36, learn: (H, rates) => fit(H, [8], [T], rates) },
  splu: { words: "sparse LU, rank 2", entries: 42, learn: (H, rates) => sparseLU(H, 2, rates) },
  tt: { words: "triangle ⊗ triangle", entries: 13, learn: (H, rates) => fit(H, [2, 4], [T, T], rates) },
  td: { words: "triangle ⊗ diagonal", entries: 7, learn: (H, rates) => fit(H, [2, 4], [T, D], rates) },
  dt: { words: "diagonal ⊗ triangle", entries: 12, learn: (H, rates) => fit(H, [2, 4], [D, T], rates) },
  scan: { words: "SCAN", entries: 9, learn: (H, rates) => fit(H, [2, 4], [D, C], rates) },
  diagonal: { words: "diagonal", entries: 8, learn: (H, rates) => fit(H, [8], [D], rates) },
};
const BRUSHES = { "-1.0": "−1", "0.0": "0", 0.5: "½", "1.0": "1", "3.0": "3" };
const PRESETS = {
  layer: {
    words: "a layer",
    make: () =>
      kron(
        [
          [2, 0],
          [0, 0.5],
        ],
        [
          [2, 1, 0, 1],
          [1, 1.5, 0, 0.5],
          [0, 0, 1, 0],
          [1, 0.5, 0, 1],
        ],
      ),
  },
  product: {
    words: "a product",
    make: () =>
      kron(
        [
          [1, 0.5],
          [0.5, -1],
        ],
        [
          [3, 1, 0, 0.5],
          [1, 1, 0.5, 0],
          [0, 0.5, 0.5, 0],
          [0.5, 0, 0, 1],
        ],
      ),
  },
  separate: { words: "diagonal", make: () => identity(N).map((row, i) => row.map(x => x * [3, 0.5, 1, -2, 0.3, 3, -0.5, 1][i])) },
  random: {
    words: "random",
    make: () => {
      const normal = normals(3),
        A = identity(N).map(row => row.map(normal));
      return A.map((row, i) => row.map((x, j) => Math.round(10 * (x + A[j][i])) / 10));
    },
  },
  mine: { words: "mine" },
};

const square = flat => Array.from({ length: N }, (_, i) => flat.slice(N * i, N * i + N));

/** Learn Q = L U with all unit vectors as probes; beside the diagonal L has `rank` columns and U as many rows. */
export function sparseLU(H, rank, rates) {
  const pattern = (i, j) => i === j || (j < rank && i > j),
    upper = M => transpose(inverse(transpose(M)));
  let L = identity(N),
    W = identity(N); // W = U^T
  for (const rate of rates) {
    const U = transpose(W),
      Q = product(L, U),
      back = product(inverse(U), upper(L)),
      a = product(Q, H),
      b = transpose(back);
    const Ph = product(transpose(Q), a),
      without = product(back, b),
      gram = M => product(M, transpose(M));
    L = step(L, pattern, gram(a), gram(b), rate);
    W = step(W, pattern, product(H, transpose(Ph)), without, rate);
  }
  return product(L, transpose(W));
}

/** The eigenvalues of P H for each form. */
export const fits = (H, rates = RATES) => Object.fromEntries(Object.entries(FORMS).map(([name, { learn }]) => [name, spectrum(learn(H, rates), H)]));

/** The largest difference from the library's eigenvalues after its updates, and counts of entries. */
export const check = ({ cases, entries }) =>
  Math.max(
    ...Object.keys(FORMS).map(name => Math.abs(FORMS[name].entries - entries[name])),
    ...cases.map(({ matrix, updates, values }) => {
      const mine = fits(square(matrix), RATES.slice(0, updates));
      return Math.max(...Object.keys(values).map(name => difference(mine[name], values[name])));
    }),
  );

export function render({ model, el }) {
  const $ = mount(
    el,
    `<div class="lv-bar lv-top"></div><div class="lv-pair"><div class="lv-cells" role="grid" aria-label="Hessian; arrow keys move, space paints"></div>
<div class="lv-side lv-tall"><canvas class="lv-rank" role="img"></canvas></div></div><p class="lv-say" aria-live="polite"></p><p class="lv-agrees"></p>`,
  );
  const get = key => model.get(key),
    grid = $(".lv-cells"),
    cells = [];
  let ink = inks(el),
    ranking = [];
  const parts = [
    choice($(".lv-top"), model, {
      legend: "begin with",
      key: "preset",
      options: Object.fromEntries(Object.entries(PRESETS).map(([key, { words }]) => [key, words])),
      chosen: preset => (preset === "mine" ? { preset } : { preset, matrix: PRESETS[preset].make().flat() }),
    }),
    choice($(".lv-top"), model, { legend: "paint with", key: "brush", options: BRUSHES }),
  ];
  function paint(k) {
    // both entries of a symmetric matrix
    const matrix = [...get("matrix")],
      value = Number(get("brush")),
      mirror = (k % N) * N + Math.floor(k / N);
    if (matrix[k] === value && matrix[mirror] === value) return;
    matrix[k] = matrix[mirror] = value;
    put(model, { preset: "mine", matrix });
  }
  function focus(k) {
    cells.forEach((cell, i) => {
      cell.tabIndex = i === k ? 0 : -1;
    });
    cells[k].focus();
  }
  for (let i = 0; i < N; i++) {
    const row = add(grid, "div", { className: "lv-line" });
    row.setAttribute("role", "row");
    for (let j = 0; j < N; j++) {
      const k = N * i + j,
        cell = add(row, "div", { className: "lv-cell", tabIndex: k ? -1 : 0 }, document.createElement("i"));
      cell.setAttribute("role", "gridcell");
      cell.addEventListener("click", () => paint(k));
      cells.push(cell);
    }
  }
  let held = false;
  const under = event => cells.indexOf(document.elementFromPoint(event.clientX, event.clientY)?.closest(".lv-cell"));
  grid.addEventListener("pointerdown", event => {
    held = !event.button;
  });
  grid.addEventListener("pointermove", event => {
    // a finger paints sideways, and scrolls the page up and down
    const k = held ? under(event) : -1;
    if (k >= 0) paint(k);
  });
  const release = () => {
    held = false;
  };
  for (const end of ["pointerup", "pointercancel"]) window.addEventListener(end, release);
  grid.addEventListener("keydown", event => {
    const k = cells.indexOf(document.activeElement),
      way = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
    if (k < 0 || (!way && event.key !== " " && event.key !== "Enter")) return;
    event.preventDefault();
    if (!way) return paint(k);
    const inside = z => Math.max(0, Math.min(N - 1, z));
    focus(inside(Math.floor(k / N) + way[0]) * N + inside((k % N) + way[1]));
  });
  function compute() {
    ink = inks(el);
    const found = fits(square(get("matrix"))),
      size = values => (Number.isFinite(spread(values)) ? spread(values) : Infinity);
    ranking = Object.entries(found)
      .map(([name, values]) => ({ ...FORMS[name], name, spread: size(values) }))
      .sort((a, b) => a.spread - b.spread);
  }
  function drawCells() {
    const matrix = get("matrix"),
      most = Math.max(1, ...matrix.map(Math.abs));
    cells.forEach((cell, k) => {
      // the area of a square is the size of the entry
      const x = matrix[k],
        edge = 100 * Math.sqrt(Math.abs(x) / most);
      Object.assign(cell.firstChild.style, { width: `${edge}%`, height: `${edge}%`, background: ink(x > 0 ? "psgd" : "newton") });
      cell.setAttribute("aria-label", `row ${Math.floor(k / N) + 1}, column ${(k % N) + 1}: ${x}`);
    });
  }
  function drawRanking() {
    const [c, w, h] = sheet($(".lv-rank")),
      left = 8,
      right = w - 58,
      top = 20,
      height = (h - top - 20) / ranking.length;
    const X = value => left + (Math.min(MOST, Math.log10(value)) / MOST) * (right - left);
    c.fillStyle = ink("ink");
    c.fillText("largest over smallest |eigenvalue of PH|", left, 12);
    for (const e of [0, 1, 2, 3, 4])
      stroke(
        c,
        [
          [X(10 ** e), top],
          [X(10 ** e), h - 18],
        ],
        { colour: ink("line"), width: 1 },
      );
    ranking.forEach(({ words, entries, spread: value }, i) => {
      const y = top + i * height;
      c.fillStyle = ink("psgd");
      c.fillRect(left, y + height * 0.55, Math.max(3, X(value) - left), height * 0.33);
      note(c, `${i + 1}. ${words}, ${entries} entries`, left + 4, y + height * 0.45, ink);
      note(c, value > 10 ** MOST ? "> 10⁴" : value.toPrecision(3), X(value) + 8, y + height * 0.85, ink);
    });
    c.fillStyle = ink("soft");
    for (const [e, words] of ["1", "10", "100", "1000", "10⁴"].entries()) c.fillText(words, X(10 ** e) - (e ? 8 : 0), h - 4);
  }
  function draw() {
    for (const part of parts) part.sync();
    drawCells();
    drawRanking();
    const [first] = ranking,
      last = ranking.at(-1),
      number = value => (value > 10 ** MOST ? "more than 10000" : value.toPrecision(3));
    const text = `Closest is ${first.words} with a ratio of ${number(first.spread)}, farthest ${last.words} with ${number(last.spread)}.`;
    tell($(".lv-say"), text);
    $(".lv-rank").setAttribute(
      "aria-label",
      `The forms in order of the ratio of the eigenvalues of PH: ${ranking.map(form => `${form.words} ${number(form.spread)}`).join(", ")}.`,
    );
  }
  agree($(".lv-agrees"), check(get("check")));
  const stop = watch(el, model, ["matrix", "preset", "brush"], { compute, draw });
  return () => {
    for (const end of ["pointerup", "pointercancel"]) window.removeEventListener(end, release);
    stop();
  };
}
export default { render };
