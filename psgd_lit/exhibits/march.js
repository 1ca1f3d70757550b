// The march of the eigenvalues of P H to 1 and -1, probe by probe.
import { apply, diagonal, dot, eigenvalues, firstScale, identity, inverse, PATTERNS, product, step, transpose } from "./algebra.js";
import { add, agree, chart, difference, inks, mount, normals, player, put, sheet, slider, tell, watch } from "./kit.js";

const N = 6,
  PROBES = 300;
const SPECTRUM = [20, 5, 1, 0.3, 0.1, -0.2];

/** A symmetric matrix with the spectrum, turned by as many random reflections as it has rows. */
export function hessian(normal) {
  let U = identity(N);
  for (let k = 0; k < N; k++) {
    const w = Array.from({ length: N }, normal),
      scale = 2 / dot(w, w);
    U = U.map(row => {
      const d = scale * dot(row, w);
      return row.map((x, j) => x - d * w[j]);
    });
  }
  return U.map(row => U.map(other => row.reduce((sum, x, k) => sum + x * SPECTRUM[k] * other[k], 0)));
}

/** Learn a triangular Q from probes: Q H Q^T before each probe, and after the last, and the eigenvalues of P H. */
export function march({ step: rate, noise, seed }, probes = PROBES) {
  const normal = normals(seed),
    H = hessian(normal),
    matrices = [],
    spectra = [];
  let Q = null;
  for (let t = 0; ; t++) {
    const v = Array.from({ length: N }, normal),
      h = apply(H, v).map(x => x + noise * normal());
    Q ??= diagonal(v.map(() => firstScale(v, h)));
    matrices.push(product(product(Q, H), transpose(Q)));
    spectra.push(eigenvalues(matrices[t]));
    if (t === probes) return { matrices, spectra };
    const a = apply(Q, h),
      b = apply(transpose(inverse(Q)), v),
      square = x => x.map(p => x.map(q => p * q));
    Q = step(Q, PATTERNS.triangle, square(a), square(b), rate);
  }
}

/** The largest difference from the library's spectra. */
export const check = ({ cases }) =>
  Math.max(
    ...cases.map(({ state, every, spectra }) =>
      difference(
        march(state, (spectra.length - 1) * every).spectra.filter((_, i) => i % every === 0),
        spectra,
      ),
    ),
  );

export function render({ model, el }) {
  const $ = mount(
    el,
    `<div class="lv-pair"><div class="lv-stage"><canvas class="lv-map" role="img"></canvas></div>
<div class="lv-side lv-tall"><canvas class="lv-eig" role="img"></canvas></div><div class="lv-player"></div></div>
<div class="lv-sliders"></div><p class="lv-say" aria-live="polite"></p><p class="lv-agrees"></p>`,
  );
  const get = key => model.get(key),
    last = () => PROBES;
  let ink = inks(el),
    found = null;
  const sliders = $(".lv-sliders"),
    parts = [
      slider(sliders, model, {
        name: "step of Q",
        key: "step",
        to: s => 10 ** (-2 + s * 0.017),
        from: v => (Math.log10(v) + 2) / 0.017,
        show: v => v.toPrecision(2),
      }),
      slider(sliders, model, {
        name: "noise in Hv",
        key: "noise",
        to: s => (s / 50) ** 3,
        from: v => 50 * Math.cbrt(v),
        show: v => (v === 0 ? "0" : v.toPrecision(2)),
      }),
      player($(".lv-player"), model, { last, show: t => `${t} probes`, say: $(".lv-say"), seconds: 6 }),
    ];
  const again = add(sliders, "button", { type: "button", className: "lv-button", textContent: "Other Hessian, other probes" });
  again.addEventListener("click", () => put(model, { seed: (get("seed") % 99) + 1 }));
  function compute() {
    ink = inks(el);
    found = march({ step: get("step"), noise: get("noise"), seed: get("seed") });
  }
  function drawMatrix() {
    const [c, w, h] = sheet($(".lv-map")),
      M = found.matrices[get("t")],
      side = (Math.min(w, h - 20) - 1) / N;
    c.fillStyle = ink("ink");
    c.fillText("entries of QHQᵀ: blue positive, red negative", 2, 12);
    for (const [i, row] of M.entries())
      for (const [j, x] of row.entries()) {
        // the area of a square is the size of the entry, 1 fills its place
        const edge = side * Math.min(1, Math.sqrt(Math.abs(x)));
        c.fillStyle = ink(x > 0 ? "psgd" : "newton");
        c.fillRect((j + 0.5) * side - edge / 2, 20 + (i + 0.5) * side - edge / 2, edge * 0.96, edge * 0.96);
        c.strokeStyle = ink("line");
        c.strokeRect(j * side + 0.5, 20 + i * side + 0.5, side, side);
      }
  }
  function draw() {
    for (const part of parts) part.sync();
    drawMatrix();
    const lines = SPECTRUM.flatMap((_, i) =>
      [1, -1].map(sign => ({
        points: found.spectra.map((e, t) => [t, e[i] * sign > 0 ? Math.log10(Math.abs(e[i])) : NaN]),
        colour: ink(sign > 0 ? "psgd" : "newton"),
        dash: sign > 0 ? [] : [5, 3],
        width: 2,
      })),
    );
    chart($(".lv-eig"), ink, {
      title: "|eigenvalues of PH|, dashed red if negative",
      x: [0, PROBES],
      y: [-3, 2],
      ticks: [0, 100, 200, 300],
      label: "probes",
      lines,
      rule: 0,
      now: get("t"),
    });
    const e = found.spectra[get("t")],
      sizes = e.map(Math.abs);
    const text = `After ${get("t")} probes the eigenvalues of PH are ${e.map(x => x.toPrecision(2)).join(", ")}: the largest is ${(Math.max(...sizes) / Math.min(...sizes)).toPrecision(2)} times the smallest.`;
    tell($(".lv-say"), text);
    $(".lv-map").setAttribute("aria-label", `The matrix QHQ^T as squares, which should become a diagonal of 1 and -1. ${text}`);
    $(".lv-eig").setAttribute("aria-label", `Sizes of the eigenvalues of PH against probes. ${text}`);
  }
  agree($(".lv-agrees"), check(get("check")));
  const stop = watch(el, model, ["step", "noise", "seed"], { compute, draw });
  return () => {
    parts[2].pause();
    stop();
  };
}
export default { render };
