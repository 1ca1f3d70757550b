// Turn the valley: plain steps, a diagonal P and a dense one go down it, or off its saddle.
import { pair, spread, times, turned } from "./algebra.js";
import {
  agree,
  arrow,
  chart,
  crosses,
  difference,
  dots,
  grip,
  inks,
  legend,
  mount,
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
  STEPS = 20,
  RATE = 0.5;
const FORMS = {
  // of P: the colour, the dashes and the words of each
  none: { colour: "sgd", dash: [6, 4], words: "no P" },
  diagonal: { colour: "sparse", words: "the best diagonal P" },
  dense: { colour: "psgd", words: "the best dense P" },
};
const KEYS = ["angle", "along", "start"];

/** H with the curvature `along` an angle and 1 across, and each form's P, as [xx, xy, yy]. */
export function matrices({ angle, along }) {
  const [xx, xy, yy] = turned(angle, along, 1);
  return { H: [xx, xy, yy], none: [1, 0, 1], diagonal: [1 / Math.hypot(xx, xy), 0, 1 / Math.hypot(xy, yy)], dense: turned(angle, 1 / Math.abs(along), 1) };
}

/** The eigenvalues of P H, which are those of P^(1/2) H P^(1/2), from trace and determinant. */
export function eigenvaluesOf(P, H) {
  const half = (P[0] * H[0] + 2 * P[1] * H[1] + P[2] * H[2]) / 2,
    det = (P[0] * P[2] - P[1] ** 2) * (H[0] * H[2] - H[1] ** 2);
  const large = half + (half < 0 ? -1 : 1) * Math.sqrt(Math.max(0, half * half - det));
  return [det / large, large].sort((a, b) => a - b);
}

/** For each form the eigenvalues of P H, and a walk whose steps are the same part of the longest stable one. */
export function walks(state, steps = STEPS) {
  const all = matrices(state),
    H = all.H;
  return Object.fromEntries(
    Object.keys(FORMS).map(name => {
      const values = name === "none" ? pair(H) : eigenvaluesOf(all[name], H),
        rate = RATE / Math.max(...values.map(Math.abs)),
        path = [state.start];
      for (let t = 0; t < steps; t++) {
        const d = times(all[name], times(H, path[t]));
        path.push([path[t][0] - rate * d[0], path[t][1] - rate * d[1]]);
      }
      return [name, { P: all[name], values, path }];
    }),
  );
}

/** The largest difference from the library's numbers. */
export const check = ({ cases }) =>
  Math.max(
    ...cases.map(({ state, forms }) => {
      const mine = walks(state, forms.none.path.length - 1);
      return Math.max(...Object.entries(forms).flatMap(([name, theirs]) => Object.keys(theirs).map(key => difference(mine[name][key], theirs[key]))));
    }),
  );

export function render({ model, el }) {
  const $ = mount(
    el,
    `<div class="lv-pair"><div class="lv-stage"><canvas class="lv-map" role="img"></canvas></div>
<div class="lv-side"><canvas class="lv-spread" role="img"></canvas><canvas class="lv-eig" role="img"></canvas></div></div>
<div class="lv-bar lv-legend"></div><div class="lv-sliders"></div><p class="lv-say" aria-live="polite"></p><p class="lv-agrees"></p>`,
  );
  const get = key => model.get(key),
    state = () => Object.fromEntries(KEYS.map(key => [key, get(key)]));
  const curve = s => (Math.abs(s - 50) < 1 ? 0.001 : Math.sign(s - 50) * ((s - 50) / 50) ** 2); // finer near 0, which is left out
  let ink = inks(el),
    found = null,
    ground = null,
    turns = null;
  legend($(".lv-legend"), FORMS);
  const parts = [
    slider($(".lv-sliders"), model, {
      name: "angle",
      key: "angle",
      to: s => (s * Math.PI) / 200,
      from: v => (v * 200) / Math.PI,
      show: v => `${Math.round((v * 180) / Math.PI)}°`,
    }),
    slider($(".lv-sliders"), model, {
      name: "curvature",
      key: "along",
      to: curve,
      from: v => 50 + 50 * Math.sign(v) * Math.sqrt(Math.abs(v)),
      show: v => v.toFixed(Math.abs(v) < 0.01 ? 3 : 2),
    }),
    grip($(".lv-stage"), { name: "Where all walks begin", box: () => BOX, get: () => get("start"), set: start => put(model, { start }) }),
  ];
  function compute() {
    ink = inks(el);
    found = walks(state());
    const { H } = matrices(state()),
      f = (x, y) => {
        const [a, b] = times(H, [x, y]);
        return (x * a + y * b) / 2;
      };
    const edge = Array.from({ length: 41 }, (_, i) => i / 10 - 2).flatMap(z => [f(z, 2), f(z, -2), f(2, z), f(-2, z)]);
    ground = terrain(f, BOX, Math.min(0, ...edge), ink);
    turns = Array.from({ length: 91 }, (_, degrees) => [degrees, walks({ ...state(), angle: (degrees * Math.PI) / 180 }, 0)]);
  }
  function drawMap() {
    const [c, w, h] = sheet($(".lv-map")),
      [to] = scales(BOX, w, h);
    c.drawImage(ground, 0, 0, w, h);
    crosses(c, [[w / 2, h / 2]], ink("ink"));
    for (const [name, { colour, dash }] of Object.entries(FORMS)) {
      const points = found[name].path.map(to);
      stroke(c, points, { colour: ink(colour), width: 2.4, dash });
      dots(c, points, ink(colour), 2.5);
      arrow(c, points[0], points[1], ink(colour));
    }
    const [X, Y] = to(get("start"));
    note(c, "drag me", X + 16, Y - 10, ink, X > w - 80 ? "right" : "left");
  }
  function drawCharts() {
    const degrees = (get("angle") * 180) / Math.PI,
      common = { x: [0, 90], ticks: [0, 30, 60, 90], tick: v => `${v}°`, label: "" };
    const lines = read =>
      Object.entries(FORMS).flatMap(([name, { colour, dash }]) =>
        read(walksAt => walksAt[name].values).flatMap(value => {
          const style = { colour: ink(colour), width: 2.4, dash };
          return [
            { ...style, points: turns.map(([d, all]) => [d, value(all)]) },
            { ...style, dots: 5, points: [[degrees, value(found)]] },
          ];
        }),
      );
    chart($(".lv-spread"), ink, {
      ...common,
      title: "largest over smallest |eigenvalue of PH|",
      y: [-0.15, 3.1],
      lines: lines(values => [all => Math.log10(spread(values(all)))]),
    });
    const names = [
      [-1, "−1"],
      [0, "0"],
      [1, "1"],
    ];
    chart($(".lv-eig"), ink, {
      ...common,
      title: "both eigenvalues of PH",
      y: [-1.6, 1.6],
      names,
      lines: lines(values => [all => values(all)[0], all => values(all)[1]]),
    });
  }
  function draw() {
    for (const part of parts) part.sync();
    drawMap();
    drawCharts();
    const ratio = name => spread(found[name].values).toPrecision(3);
    const text = `Turned by ${Math.round((get("angle") * 180) / Math.PI)}°, the largest eigenvalue of PH is ${ratio("none")} times the smallest without P, ${ratio("diagonal")} times with the best diagonal and ${ratio("dense")} times with the best dense P.`;
    tell($(".lv-say"), text);
    $(".lv-map").setAttribute("aria-label", `A quadratic with ${get("along") < 0 ? "a saddle" : "a valley"} and three walks from one point. ${text}`);
    $(".lv-spread").setAttribute("aria-label", `The ratio of the eigenvalues of PH against the angle, for three forms. ${text}`);
    $(".lv-eig").setAttribute("aria-label", `The eigenvalues of PH against the angle, for three forms. ${text}`);
  }
  agree($(".lv-agrees"), check(get("check")));
  return watch(el, model, KEYS, { compute, draw });
}
export default { render };
