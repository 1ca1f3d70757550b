// A plain with a cliff behind its minimum: PSGD goes there with a longest step, and damping, or with neither.
import { learn, precondition } from "./algebra.js";
import {
  agree,
  chart,
  crosses,
  difference,
  dots,
  grip,
  inks,
  legend,
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

const BOX = [-26, 10, -18, 18],
  STEPS = 150,
  RATE = 0.5,
  LOST = 1e12;
const RUNS = {
  // the colour, the dashes and the words of each
  bare: { colour: "third", dash: [6, 4], words: "neither clipped nor damped" },
  yours: { colour: "psgd", words: "with your threshold and damping" },
};
const KEYS = ["start", "threshold", "damping", "step", "seed"];

/** The loss of a count with logarithmic link, e^x - x - 1, and y^2 / 2 beside it. */
export const loss = ([x, y]) => Math.expm1(x) - x + (y * y) / 2;

/** One run: its points, and the length of P g at each; it ends early where the loss has no number of use. */
export function descend({ start, threshold, damping, step, seed }, steps = STEPS) {
  const normal = normals(seed),
    path = [start],
    lengths = [];
  let Q = [1, 0, 1];
  for (let t = 0; t < steps && loss(path[t]) < LOST; t++) {
    const [x, y] = path[t],
      e = Math.exp(x),
      v = [normal(), normal()],
      u = [normal(), normal()];
    const d = precondition(Q, [Math.expm1(x), y]),
      length = Math.hypot(...d),
      k = RATE * Math.min(1, threshold / length);
    path.push([x - k * d[0], y - k * d[1]]);
    lengths.push(length);
    Q = learn(Q, v, [e * v[0] + damping * u[0], v[1] + damping * u[1]], step);
  }
  return { path, lengths };
}

/** The largest difference from the library's runs. */
export const check = ({ cases }) =>
  Math.max(
    ...cases.map(({ state, every, path, lengths }) => {
      const mine = descend({ ...state, threshold: state.threshold ?? Infinity }, (path.length - 1) * every),
        thin = list => list.filter((_, i) => i % every === 0);
      return Math.max(difference(thin(mine.path), path), difference(thin(mine.lengths), lengths));
    }),
  );

export function render({ model, el }) {
  const $ = mount(
    el,
    `<div class="lv-pair"><div class="lv-stage"><canvas class="lv-map" role="img"></canvas></div>
<div class="lv-side"><canvas class="lv-loss" role="img"></canvas><canvas class="lv-length" role="img"></canvas></div>
<div class="lv-player"></div></div><div class="lv-bar lv-legend"></div><div class="lv-sliders"></div>
<p class="lv-say" aria-live="polite"></p><p class="lv-agrees"></p>`,
  );
  const get = key => model.get(key),
    state = () => Object.fromEntries(KEYS.map(key => [key, get(key)]));
  let ink = inks(el),
    found = null,
    ground = null;
  legend($(".lv-legend"), RUNS);
  const parts = [
    slider($(".lv-sliders"), model, {
      name: "threshold Ω",
      key: "threshold",
      to: s => 10 ** (-0.5 + 0.025 * s),
      from: v => (Math.log10(v) + 0.5) / 0.025,
      show: v => v.toPrecision(2),
    }),
    slider($(".lv-sliders"), model, { name: "damping λ", key: "damping", to: s => (s / 150) ** 2, from: v => 150 * Math.sqrt(v), show: v => v.toFixed(2) }),
    slider($(".lv-sliders"), model, {
      name: "step of Q",
      key: "step",
      to: s => 10 ** (-2 + s * 0.015),
      from: v => (Math.log10(v) + 2) / 0.015,
      show: v => v.toPrecision(2),
    }),
    grip($(".lv-stage"), { name: "Where both runs begin", box: () => BOX, get: () => get("start"), set: start => put(model, { start }) }),
    player($(".lv-player"), model, { last: () => STEPS, show: t => `${t} steps`, say: $(".lv-say"), seconds: 5 }),
  ];
  function compute() {
    ink = inks(el);
    found = { yours: descend(state()), bare: descend({ ...state(), threshold: Infinity, damping: 0 }) };
    ground = terrain((x, y) => loss([x, y]), BOX, 0, ink, { bend: 0.5, bands: 20 });
  }
  function drawMap() {
    const [c, w, h] = sheet($(".lv-map")),
      [to] = scales(BOX, w, h);
    c.drawImage(ground, 0, 0, w, h);
    crosses(c, [to([0, 0])], ink("ink"));
    for (const [name, { colour, dash }] of Object.entries(RUNS)) {
      const seen = found[name].path.slice(0, get("t") + 1).map(to);
      stroke(c, seen, { colour: ink(colour), width: 2.2, dash });
      dots(c, seen, ink(colour), 2.2);
      dots(c, seen.slice(-1), ink(colour), 5);
    }
    const [X, Y] = to(get("start"));
    note(c, "drag me", X, Y - 18, ink, X < 40 ? "left" : "center");
    note(c, "cliff", w - 6, 16, ink, "right");
  }
  function drawCharts() {
    const common = { x: [0, STEPS], ticks: [0, 50, 100, 150], label: "steps", now: get("t") };
    const lines = read =>
      Object.entries(RUNS).map(([name, { colour, dash }]) => ({
        colour: ink(colour),
        width: 2.2,
        dash,
        points: read(found[name]).map((z, t) => [t, Math.log10(Math.max(z, 1e-16))]),
      }));
    chart($(".lv-loss"), ink, { ...common, title: "loss", y: [-12, 4], lines: lines(({ path }) => path.map(loss)) });
    chart($(".lv-length"), ink, {
      ...common,
      title: "|Pg|, and the threshold",
      y: [-6, 4],
      rule: Math.log10(get("threshold")),
      lines: lines(({ lengths }) => lengths),
    });
  }
  function draw() {
    for (const part of parts) part.sync();
    drawMap();
    drawCharts();
    const fate = ({ path }) => {
      const arrived = path.findIndex(point => loss(point) < 1e-8),
        longest = Math.max(...path.map(point => point[0]));
      return arrived >= 0 ? `is at the minimum after ${arrived} steps` : longest > BOX[1] ? "is thrown over the cliff" : `has not arrived after ${STEPS} steps`;
    };
    const text = `With your threshold and damping the run ${fate(found.yours)}; with neither it ${fate(found.bare)}.`;
    tell($(".lv-say"), text);
    $(".lv-map").setAttribute("aria-label", `A plain on the left, a cliff on the right and a minimum before it, with two runs. ${text}`);
    $(".lv-loss").setAttribute("aria-label", `Loss of both runs against steps. ${text}`);
    $(".lv-length").setAttribute("aria-label", `Length of P g in both runs against steps, and the threshold. ${text}`);
  }
  agree($(".lv-agrees"), check(get("check")));
  const stop = watch(el, model, KEYS, { compute, draw });
  return () => {
    parts[4].pause();
    stop();
  };
}
export default { render };
