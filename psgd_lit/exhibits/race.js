// A race in the plane: PSGD against SGD, momentum, Adam and Newton on a valley, a saddle and Rosenbrock's function.
import { firstScale, learn, pair, precondition, times, turned } from "./algebra.js";
import {
  add,
  agree,
  chart,
  choice,
  crosses,
  difference,
  dots,
  grip,
  inks,
  mount,
  normals,
  note,
  player,
  put,
  scales,
  sheet,
  slider,
  stroke,
  tell,
  terrain,
  watch,
} from "./kit.js";

const MEMORIES = [0.5, 0.8, 0.9, 0.95];
const METHODS = {
  // the cost of a step in gradients, and what may be tuned beside the step size
  sgd: { name: "SGD", cost: 1, dash: [] },
  momentum: { name: "momentum", cost: 1, dash: [6, 4], second: "memory", values: MEMORIES },
  adam: { name: "Adam", cost: 1, dash: [8, 3, 2, 3], second: "memory", values: MEMORIES },
  newton: { name: "Newton", cost: 5, dash: [3, 3] },
  psgd: { name: "PSGD", cost: 3, dash: [], second: "step of Q", values: [0.05, 0.1, 0.2, 0.4] },
};
const SURFACES = { valley: "narrow valley", saddle: "saddle", rosenbrock: "Rosenbrock" };
const STEPS = 120,
  GRADIENTS = 360;
const RATES = Array.from({ length: 14 }, (_, i) => 10 ** (-3 + (3.25 * i) / 13));

/** A surface: its value, gradient, Hessian [xx, xy, yy], the box that is shown, its minima and the longest step. */
export function problem({ surface, condition, angle }) {
  if (surface === "rosenbrock")
    return {
      f: (x, y) => 100 * (y - x * x) ** 2 + (1 - x) ** 2,
      g: (x, y) => [-400 * x * (y - x * x) - 2 * (1 - x), 200 * (y - x * x)],
      H: (x, y) => [1200 * x * x - 400 * y + 2, -400 * x, 200],
      box: [-1.8, 1.8, -0.9, 2.7],
      minima: [[1, 1]],
      floor: 0,
      reach: 0.3,
      start: [-1, 1],
      bend: 0.6,
    };
  const c = Math.cos(angle),
    s = Math.sin(angle),
    k = 1 / condition,
    double = surface === "saddle";
  const turn = (x, y) => [c * x + s * y, c * y - s * x],
    back = (u, w) => [c * u - s * w, s * u + c * w];
  return {
    // along u: k u^2 / 2, or for a saddle k (u^2 - 1)^2 / 4; across: w^2 / 2
    f: (x, y) => {
      const [u, w] = turn(x, y);
      return (w * w) / 2 + k * (double ? (u * u - 1) ** 2 / 4 : (u * u) / 2);
    },
    g: (x, y) => {
      const [u, w] = turn(x, y);
      return back(k * (double ? u * u * u - u : u), w);
    },
    H: (x, y) => {
      const [u] = turn(x, y),
        l = k * (double ? 3 * u * u - 1 : 1);
      return turned(angle, l, 1);
    },
    box: [-2, 2, -2, 2],
    minima: double ? [back(1, 0), back(-1, 0)] : [[0, 0]],
    floor: 0,
    reach: 1,
    start: double ? back(0.1, 1.2) : back(1.6, 0.7),
    bend: 1,
  };
}

/** The eigenvalues of Q H Q^T, which are those of P H. */
const curvatures = ([q0, q1, q2], [xx, xy, yy]) => pair([q0 * (q0 * xx + 2 * q1 * xy) + q1 * q1 * yy, q2 * (q0 * xy + q1 * yy), q2 * q2 * yy]);

/** One run: the points, and for PSGD each Q and the eigenvalues of P H. All methods meet the same noise. */
export function run(method, p, start, { noise, rate, second, steps, seed }) {
  const normal = normals(seed),
    path = [start],
    spectra = [],
    factors = [];
  let [x, y] = start,
    m = [0, 0],
    s = [0, 0],
    Q = null;
  for (let t = 1; t <= steps; t++) {
    const exact = p.g(x, y),
      H = p.H(x, y);
    const g = [exact[0] + noise * normal(), exact[1] + noise * normal()],
      v = [normal(), normal()];
    let d = g;
    if (method === "momentum") d = m = [second * m[0] + g[0], second * m[1] + g[1]];
    else if (method === "adam") {
      m = [second * m[0] + (1 - second) * g[0], second * m[1] + (1 - second) * g[1]];
      s = [0.999 * s[0] + 0.001 * g[0] * g[0], 0.999 * s[1] + 0.001 * g[1] * g[1]];
      const one = 1 - second ** t,
        two = 1 - 0.999 ** t;
      d = [m[0] / one / (Math.sqrt(s[0] / two) + 1e-8), m[1] / one / (Math.sqrt(s[1] / two) + 1e-8)];
    } else if (method === "newton") {
      const det = H[0] * H[2] - H[1] * H[1];
      d = [(H[2] * g[0] - H[1] * g[1]) / det, (H[0] * g[1] - H[1] * g[0]) / det];
    }
    const h = times(H, v).map(x => x + noise * normal());
    if (method === "psgd") {
      const scale = firstScale(v, h);
      Q ??= [scale, 0, scale];
      d = precondition(Q, g);
      factors.push(Q);
      spectra.push(curvatures(Q, H));
      Q = learn(Q, v, h, second);
    }
    const length = rate * Math.hypot(...d),
      k = length > p.reach ? (rate * p.reach) / length : rate;
    x -= k * d[0];
    y -= k * d[1];
    path.push([x, y]);
    if (!(Math.abs(x) + Math.abs(y) < 1e6)) break;
  }
  return { path, spectra, factors };
}

/** The run of a method whose loss is lowest over the last quarter, among all settings that it may try. */
export function tune(method, p, start, options) {
  let best = null;
  for (const second of METHODS[method].values ?? [0])
    for (const rate of RATES) {
      const found = run(method, p, start, { ...options, rate, second });
      const loss = found.path.map(point => p.f(...point) - p.floor),
        quarter = Math.ceil(options.steps / 4);
      const score = loss.length > options.steps ? loss.slice(-quarter).reduce((a, b) => a + b) / quarter : Infinity;
      if (!best || score < best.score) best = { ...found, loss, score, rate, second };
    }
  return best;
}

/** The largest difference from the library's runs. */
export function check({ cases }) {
  return Math.max(
    ...cases.map(({ state, runs }) => {
      const p = problem(state);
      return Math.max(
        ...Object.entries(runs).map(([method, { rate, second, every, path, spectra }]) => {
          const mine = run(method, p, state.start, { ...state, rate, second, steps: (path.length - 1) * every });
          const thin = list => list.filter((_, i) => i % every === 0);
          return Math.max(difference(thin(mine.path), path), spectra ? difference(thin(mine.spectra), spectra) : 0);
        }),
      );
    }),
  );
}

const small = x => (Math.abs(x) < 1e-13 ? "below 1e-13" : Math.abs(x) >= 0.01 && Math.abs(x) < 1000 ? x.toPrecision(2) : x.toExponential(0));

export function render({ model, el }) {
  const $ = mount(
    el,
    `<div class="lv-bar lv-top"></div><div class="lv-pair"><div class="lv-stage"><canvas class="lv-map" role="img"></canvas></div>
<div class="lv-side"><canvas class="lv-loss" role="img"></canvas><canvas class="lv-eig" role="img"></canvas></div>
<div class="lv-player"></div></div><div class="lv-bar lv-legend" role="group" aria-label="methods"></div><div class="lv-sliders"></div>
<p class="lv-say" aria-live="polite"></p><p class="lv-agrees"></p>`,
  );
  const get = key => model.get(key),
    ink = name => colours(name);
  let colours = inks(el),
    p = null,
    runs = {},
    ground = null;
  const byCost = () => get("axis") === "cost",
    last = () => (byCost() ? GRADIENTS : STEPS),
    price = m => (byCost() ? METHODS[m].cost : 1);
  const at = (m, list) => list[Math.min(Math.floor(get("t") / price(m)), list.length - 1)];
  const parts = [
    choice($(".lv-top"), model, {
      legend: "surface",
      key: "surface",
      options: SURFACES,
      chosen: surface => ({ surface, start: problem({ surface, condition: get("condition"), angle: get("angle") }).start }),
    }),
    choice($(".lv-top"), model, {
      legend: "time is counted in",
      key: "axis",
      options: { steps: "steps", cost: "gradients" },
      chosen: axis => ({ axis, t: Math.round((get("t") / last()) * (axis === "cost" ? GRADIENTS : STEPS)) }),
    }),
    slider($(".lv-sliders"), model, {
      name: "condition",
      key: "condition",
      to: s => 10 ** (0.03 * s),
      from: v => Math.log10(v) / 0.03,
      show: v => v.toPrecision(v < 100 ? 2 : 3),
    }),
    slider($(".lv-sliders"), model, {
      name: "angle",
      key: "angle",
      to: s => (s * Math.PI) / 200,
      from: v => (v * 200) / Math.PI,
      show: v => `${Math.round((v * 180) / Math.PI)}°`,
    }),
    slider($(".lv-sliders"), model, {
      name: "noise",
      key: "noise",
      to: s => (s / 125) ** 2,
      from: v => 125 * Math.sqrt(v),
      show: v => (v === 0 ? "0" : v < 0.01 ? v.toExponential(0) : v.toFixed(2)),
    }),
    grip($(".lv-stage"), { name: "Start of the race", box: () => p.box, get: () => get("start"), set: start => put(model, { start }) }),
    ...Object.keys(METHODS).map(key),
  ];
  const again = add($(".lv-sliders"), "button", { type: "button", className: "lv-button", textContent: "Other noise, other probes" });
  again.addEventListener("click", () => put(model, { seed: (get("seed") % 99) + 1 }));
  const race = player($(".lv-player"), model, { last, show: t => (byCost() ? `${t} gradients` : `${t} steps`), say: $(".lv-say") });

  function key(m) {
    const input = Object.assign(document.createElement("input"), { type: "checkbox" }),
      words = document.createElement("span");
    const label = add($(".lv-legend"), "label", {}, input);
    label.insertAdjacentHTML(
      "beforeend",
      `<svg class="lv-key" viewBox="0 0 24 10" aria-hidden="true"><path d="M0 5H24" stroke="var(--${m})" stroke-width="3" stroke-dasharray="${METHODS[m].dash}"/></svg>`,
    );
    label.append(words);
    input.addEventListener("change", () => put(model, { methods: Object.keys(METHODS).filter(k => (k === m ? input.checked : get("methods").includes(k))) }));
    return {
      sync() {
        input.checked = get("methods").includes(m);
        const r = runs[m];
        words.textContent = METHODS[m].name + (r ? ` (rate ${r.rate.toPrecision(2)}${METHODS[m].second ? `, ${METHODS[m].second} ${r.second}` : ""})` : "");
      },
    };
  }
  function compute() {
    if (get("t") > last()) model.set("t", last());
    colours = inks(el);
    p = problem({ surface: get("surface"), condition: get("condition"), angle: get("angle") });
    const options = m => ({ noise: get("noise"), seed: get("seed"), steps: Math.floor(last() / price(m)) });
    runs = Object.fromEntries(get("methods").map(m => [m, tune(m, p, get("start"), options(m))]));
    ground = terrain(p.f, p.box, p.floor, ink, { bend: p.bend });
  }
  function drawMap() {
    const [c, w, h] = sheet($(".lv-map")),
      [to] = scales(p.box, w, h),
      t = get("t");
    c.drawImage(ground, 0, 0, w, h);
    crosses(c, p.minima.map(to), ink("ink"));
    for (const m in runs) {
      const seen = runs[m].path.slice(0, Math.floor(t / price(m)) + 1).map(to),
        width = m === "psgd" ? 2.6 : 1.6;
      stroke(c, seen, { colour: ink(m), width });
      dots(c, seen, ink(m), width * 0.8);
      dots(c, seen.slice(-1), ink(m), 5);
    }
    if (runs.psgd) drawEllipse(c, to);
    const [X, Y] = to(get("start")),
      place = X < 40 ? "left" : X > w - 40 ? "right" : "center";
    note(c, "drag me", X, Y < 30 ? Y + 22 : Y - 12, ink, place); // inside the first ellipse
  }
  function drawEllipse(c, to) {
    // { Q^T u, |u| = r } about the point: directions that P stretches are long
    const [q0, q1, q2] = at("psgd", runs.psgd.factors),
      [x, y] = at("psgd", runs.psgd.path);
    const r = (0.13 * (p.box[1] - p.box[0])) / Math.max(Math.hypot(q0, q1), q2);
    const ring = Array.from({ length: 61 }, (_, k) => [Math.cos((k * Math.PI) / 30) * r, Math.sin((k * Math.PI) / 30) * r]);
    stroke(
      c,
      ring.map(([u, w]) => to([x + q0 * u, y + q1 * u + q2 * w])),
      { colour: ink("psgd"), width: 1.8 },
    );
    c.fillStyle = `${ink("psgd")}30`;
    c.fill();
  }
  function drawCharts() {
    const x = [0, last()],
      ticks = [0, last() / 3, (2 * last()) / 3, last()],
      label = byCost() ? "gradients" : "steps",
      now = get("t");
    const line = (m, values) => ({ points: values.map((z, i) => [i * price(m), z]), colour: ink(m), dash: METHODS[m].dash, width: m === "psgd" ? 2.6 : 1.8 });
    const lines = Object.keys(runs).map(m =>
      line(
        m,
        runs[m].loss.map(z => Math.log10(Math.max(z, 1e-13))),
      ),
    );
    chart($(".lv-loss"), ink, { title: "loss above its minimum", x, y: [-12, 2], ticks, label, lines, now });
    const side = (i, sign) => ({
      ...line(
        "psgd",
        runs.psgd.spectra.map(e => (e[i] * sign > 0 ? Math.log10(Math.abs(e[i])) : NaN)),
      ),
      dash: sign > 0 ? [] : [5, 4],
    });
    const eigs = runs.psgd ? [side(0, 1), side(0, -1), side(1, 1), side(1, -1)] : [];
    chart($(".lv-eig"), ink, { title: "PSGD: |eigenvalues of PH|, dashed if negative", x, y: [-3, 3], ticks, label, lines: eigs, rule: 0, now });
  }
  function report() {
    const losses = Object.keys(runs)
      .map(m => `${METHODS[m].name} ${small(at(m, runs[m].loss))}`)
      .join(", ");
    const e = runs.psgd ? ` Eigenvalues of PH: ${at("psgd", runs.psgd.spectra).map(small).join(" and ")}.` : "";
    const text = `Loss after ${get("t")} ${byCost() ? "gradients" : "steps"}: ${losses || "no method is chosen"}.${e}`;
    tell($(".lv-say"), text);
    $(".lv-map").setAttribute("aria-label", `Map of the ${SURFACES[get("surface")]} with the paths. ${text}`);
    $(".lv-loss").setAttribute("aria-label", `Loss against ${byCost() ? "gradients" : "steps"}. ${text}`);
    $(".lv-eig").setAttribute("aria-label", `Sizes of the eigenvalues of PH, which should come to 1.${e}`);
  }
  function draw() {
    for (const part of [...parts, race]) part.sync();
    for (const name of ["condition", "angle"]) $(`.lv-${name} input`).disabled = get("surface") === "rosenbrock";
    drawMap();
    drawCharts();
    report();
  }
  agree($(".lv-agrees"), check(get("check")));
  const stop = watch(el, model, ["surface", "start", "condition", "angle", "noise", "seed", "methods", "axis"], { compute, draw });
  if (get("autoplay") && !race.still()) race.start();
  return () => {
    race.pause();
    stop();
  };
}
export default { render };
