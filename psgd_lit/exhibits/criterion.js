// What the criterion asks of P: turn the Hessian, and give its products and the gradient noise of their own.
import { times, turned } from "./algebra.js";
import {
  agree,
  arrow,
  chart,
  crosses,
  difference,
  dots,
  grip,
  inks,
  mount,
  normals,
  note,
  put,
  scales,
  sheet,
  slider,
  stroke,
  tell,
  terrain,
  watch,
} from "./kit.js";

const BOX = [-2, 2, -2, 2],
  STEEP = 1,
  POINTS = 150;

/** H, the best P for products with noise, the eigenvalues of P H, and where noisy steps end, with P and with H^-1. */
export function steps({ angle, along, products, gradients, start, seed }, count = POINTS) {
  const best = l => 1 / Math.sqrt(l * l + products * products),
    normal = normals(seed);
  const H = turned(angle, along, STEEP),
    P = turned(angle, best(along), best(STEEP)),
    inverse = turned(angle, 1 / along, 1 / STEEP);
  const g = times(H, start),
    clouds = { psgd: [], newton: [] };
  for (let i = 0; i < count; i++) {
    const noisy = [g[0] + gradients * normal(), g[1] + gradients * normal()];
    for (const [name, M] of [
      ["psgd", P],
      ["newton", inverse],
    ]) {
      const d = times(M, noisy);
      clouds[name].push([start[0] - d[0], start[1] - d[1]]);
    }
  }
  return { H, P, eigenvalues: [along * best(along), STEEP * best(STEEP)].sort((a, b) => a - b), ...clouds };
}

/** The largest difference from the library's numbers. */
export const check = ({ cases }) =>
  Math.max(
    ...cases.map(({ state, numbers }) => {
      const mine = steps(state, numbers.psgd.length);
      return Math.max(...Object.keys(numbers).map(key => difference(mine[key], numbers[key])));
    }),
  );

export function render({ model, el }) {
  const $ = mount(
    el,
    `<div class="lv-pair"><div class="lv-stage"><canvas class="lv-map" role="img"></canvas></div>
<div class="lv-side"><canvas class="lv-eig" role="img"></canvas><canvas class="lv-gain" role="img"></canvas></div></div>
<div class="lv-sliders"></div><p class="lv-say" aria-live="polite"></p><p class="lv-agrees"></p>`,
  );
  const get = key => model.get(key),
    noise = { to: s => (s / 100) ** 2, from: v => 100 * Math.sqrt(v), show: v => v.toFixed(2) };
  let ink = inks(el),
    now = null,
    ground = null;
  const state = () => Object.fromEntries(["angle", "along", "products", "gradients", "start", "seed"].map(key => [key, get(key)]));
  const curve = s => (s === 50 ? 0.001 : Math.sign(s - 50) * ((s - 50) / 50) ** 2); // finer near 0, which no inverse has
  const sliders = $(".lv-sliders"),
    parts = [
      slider(sliders, model, {
        name: "curvature",
        key: "along",
        to: curve,
        from: v => 50 + 50 * Math.sign(v) * Math.sqrt(Math.abs(v)),
        show: v => v.toFixed(2),
      }),
      slider(sliders, model, {
        name: "angle",
        key: "angle",
        to: s => (s * Math.PI) / 100,
        from: v => (v * 100) / Math.PI,
        show: v => `${Math.round((v * 180) / Math.PI)}°`,
      }),
      slider(sliders, model, { name: "noise in Hv", key: "products", ...noise }),
      slider(sliders, model, { name: "noise in g", key: "gradients", ...noise }),
      grip($(".lv-stage"), { name: "Where the step begins", box: () => BOX, get: () => get("start"), set: start => put(model, { start }) }),
    ];
  function compute() {
    ink = inks(el);
    now = steps(state());
    const f = (x, y) => {
      const [a, b] = times(now.H, [x, y]);
      return (x * a + y * b) / 2;
    };
    ground = terrain(f, BOX, Math.min(0, f(2, 2), f(2, -2), f(2, 0), f(0, 2), f(2, 1), f(2, -1), f(1, 2), f(-1, 2)), ink);
  }
  function drawMap() {
    const [c, w, h] = sheet($(".lv-map")),
      [to] = scales(BOX, w, h),
      [X, Y] = to(get("start")),
      mean = cloud => [0, 1].map(i => cloud.reduce((a, z) => a + z[i], 0) / cloud.length);
    c.drawImage(ground, 0, 0, w, h);
    crosses(c, [[w / 2, h / 2]], ink("ink"));
    for (const name of ["newton", "psgd"]) {
      dots(c, now[name].map(to), `${ink(name)}90`, 2.2);
      arrow(c, [X, Y], to(mean(now[name])), ink(name));
    }
    ring(c, to);
    note(c, "drag me", X + 16, Y - 10, ink);
  }
  function ring(c, to) {
    // { P^(1/2) u, |u| = r }
    const [x, y] = get("start"),
      best = l => (l * l + get("products") ** 2) ** -0.25,
      half = turned(get("angle"), best(get("along")), best(STEEP));
    const r = 0.6 / Math.max(best(get("along")), best(STEEP));
    const edge = Array.from({ length: 61 }, (_, k) => times(half, [r * Math.cos((k * Math.PI) / 30), r * Math.sin((k * Math.PI) / 30)]));
    stroke(
      c,
      edge.map(([u, v]) => to([x + u, y + v])),
      { colour: ink("psgd") },
    );
  }
  function drawCharts() {
    const s = get("products"),
      l = Array.from({ length: 241 }, (_, i) => (i - 120) / 100),
      x = [-1.2, 1.2],
      ticks = [-1, 0, 1.2],
      label = "curvature";
    const found = [get("along"), STEEP],
      eigenvalue = v => v / Math.sqrt(v * v + s * s || 1e-30),
      gain = v => -Math.log10(Math.sqrt(v * v + s * s) || 1e-15);
    const blue = { colour: ink("psgd"), width: 2.4 },
      red = { colour: ink("newton"), dash: [3, 3] };
    chart($(".lv-eig"), ink, {
      title: "eigenvalue of PH (blue), of Newton's (red)",
      x,
      y: [-1.3, 1.3],
      ticks,
      label,
      names: [
        [-1, "−1"],
        [0, "0"],
        [1, "1"],
      ],
      lines: [
        {
          ...red,
          points: [
            [-1.2, 1],
            [1.2, 1],
          ],
        },
        { ...blue, points: l.map(v => [v, eigenvalue(v)]) },
        { ...blue, dots: 5, points: found.map(v => [v, eigenvalue(v)]) },
      ],
    });
    chart($(".lv-gain"), ink, {
      title: "by how much noise of g is enlarged",
      x,
      y: [-0.3, 3],
      ticks,
      label,
      lines: [
        { ...red, points: l.map(v => [v, -Math.log10(Math.abs(v) || 1e-15)]) },
        { ...blue, points: l.map(v => [v, gain(v)]) },
        { ...blue, dots: 5, points: found.map(v => [v, gain(v)]) },
      ],
    });
  }
  function draw() {
    for (const part of parts) part.sync();
    drawMap();
    drawCharts();
    const spread = cloud => {
      const m = [0, 1].map(i => cloud.reduce((a, z) => a + z[i], 0) / cloud.length);
      return Math.sqrt(cloud.reduce((a, z) => a + (z[0] - m[0]) ** 2 + (z[1] - m[1]) ** 2, 0) / cloud.length);
    };
    const text = `Eigenvalues of PH: ${now.eigenvalues.map(v => v.toFixed(2)).join(" and ")}. Steps of PSGD scatter by ${spread(now.psgd).toPrecision(2)}, Newton's by ${spread(now.newton).toPrecision(2)}.`;
    tell($(".lv-say"), text);
    $(".lv-map").setAttribute("aria-label", `A quadratic of curvatures ${get("along").toFixed(2)} and 1, with the ends of ${POINTS} noisy steps. ${text}`);
    $(".lv-eig").setAttribute("aria-label", `Eigenvalue of PH against curvature: a curve from -1 to 1, steep at 0. ${text}`);
    $(".lv-gain").setAttribute("aria-label", `Gain against curvature: Newton's has a pole at 0, that of P ends at one over the noise. ${text}`);
  }
  agree($(".lv-agrees"), check(get("check")));
  return watch(el, model, Object.keys(state()), { compute, draw });
}
export default { render };
