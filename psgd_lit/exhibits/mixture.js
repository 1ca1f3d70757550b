// What the normalised step finds where the curvature changes from pair to pair: many runs of one number P.
import { add, agree, chart, choice, difference, inks, legend, mount, normals, player, power, put, slider, tell, watch } from "./kit.js";

const RUNS = 12,
  PAIRS = 1000;
const DECAY = { pair: 0, running: 0.99 }; // what a remembered peak is multiplied by
const KEYS = ["share", "small", "rule", "step", "seed"];
const LINES = {
  // the colour, the dashes and the words of each
  runs: { colour: "psgd", words: "P in twelve runs" },
  best: { colour: "ink", dash: [2, 3], words: "the criterion's minimum" },
  often: { colour: "third", dash: [7, 4], words: "median of |v/h|" },
};

/** Where the criterion has its minimum, and the median of |v / h|, for curvatures 1 in a share of pairs and else small. */
export const ends = ({ share, small }) => ({ best: 1 / Math.sqrt(share + (1 - share) * small * small), often: share > 0.5 ? 1 : 1 / small });

/** P of each run after each pair, from 1 at first; a run keeps the root of its largest slope, and no peak grows tenfold. */
export function runs({ share, small, rule, step, seed }, pairs = PAIRS) {
  const normal = normals(seed),
    q = Array(RUNS).fill(1),
    peaks = Array(RUNS).fill(0),
    found = q.map(() => [1]);
  for (let t = 0; t < pairs; t++)
    for (let i = 0; i < RUNS; i++) {
      const v = normal(),
        rare = Math.abs(Math.atan2(normal(), normal())) < Math.PI * share,
        h = (rare ? 1 : small) * v;
      const a = q[i] * h,
        b = v / q[i],
        E = (a + b) * (a - b),
        old = Math.sqrt(DECAY[rule]) * peaks[i],
        size = Math.abs(E);
      const largest = Math.max(size, old * old);
      if (largest > 0) q[i] -= ((step * E) / largest) * q[i];
      if (DECAY[rule]) peaks[i] = old > 0 ? Math.min(Math.max(Math.sqrt(size), old), 10 * old) : Math.sqrt(size);
      found[i].push(q[i] * q[i]);
    }
  return found;
}

/** The mean of E / max|E| of a pair at a P, and of E itself over its size: where each is zero, its rule rests. */
export const pushes = ({ share, small }, P) => {
  const sign = c => Math.sign(P * c - 1),
    moment = P * P * (share + (1 - share) * small * small);
  return { often: share * sign(1) + (1 - share) * sign(small), best: (moment - 1) / (moment + 1) };
};

/** The largest difference from the library's runs. */
export const check = ({ cases }) =>
  Math.max(
    ...cases.map(({ state, every, found, best }) => {
      const mine = runs(state, (found[0].length - 1) * every).map(run => run.filter((_, t) => t % every === 0));
      return Math.max(difference(mine, found), difference(ends(state).best, best));
    }),
  );

export function render({ model, el }) {
  const $ = mount(
    el,
    `<div class="lv-bar lv-top"></div><div class="lv-pair"><div class="lv-wide"><canvas class="lv-runs" role="img"></canvas></div>
<div class="lv-wide"><canvas class="lv-push" role="img"></canvas></div><div class="lv-player"></div></div>
<div class="lv-bar lv-legend"></div><div class="lv-sliders"></div><p class="lv-say" aria-live="polite"></p><p class="lv-agrees"></p>`,
  );
  const get = key => model.get(key),
    state = () => Object.fromEntries(KEYS.map(key => [key, get(key)]));
  let ink = inks(el),
    found = null;
  legend($(".lv-legend"), LINES);
  const sliders = $(".lv-sliders"),
    parts = [
      choice($(".lv-top"), model, { legend: "divide a gradient by", key: "rule", options: { pair: "its own size", running: "the largest in memory" } }),
      slider(sliders, model, {
        name: "share of 1",
        key: "share",
        to: s => 0.01 + 0.0089 * s,
        from: v => (v - 0.01) / 0.0089,
        show: v => `${Math.round(100 * v)} %`,
      }),
      slider(sliders, model, {
        name: "else",
        key: "small",
        to: s => 10 ** (-2 + s * 0.017),
        from: v => (Math.log10(v) + 2) / 0.017,
        show: v => v.toPrecision(2),
      }),
      slider(sliders, model, {
        name: "step of Q",
        key: "step",
        to: s => 10 ** (-2 + s * 0.017),
        from: v => (Math.log10(v) + 2) / 0.017,
        show: v => v.toPrecision(2),
      }),
      player($(".lv-player"), model, { last: () => PAIRS, show: t => `${t} pairs`, say: $(".lv-say"), seconds: 6 }),
    ];
  const again = add(sliders, "button", { type: "button", className: "lv-button", textContent: "Other pairs" });
  again.addEventListener("click", () => put(model, { seed: (get("seed") % 99) + 1 }));
  function compute() {
    ink = inks(el);
    found = runs(state());
  }
  function draw() {
    for (const part of parts) part.sync();
    const t = get("t"),
      end = ends(state()),
      style = name => ({ colour: ink(LINES[name].colour), dash: LINES[name].dash, width: 2.2 });
    const level = name => ({
      ...style(name),
      points: [
        [0, Math.log10(end[name])],
        [PAIRS, Math.log10(end[name])],
      ],
    });
    const lines = [...found.map(run => ({ ...style("runs"), width: 1, points: run.map((P, i) => [i, Math.log10(P)]) })), level("often"), level("best")];
    chart($(".lv-runs"), ink, { title: "P against the pairs", x: [0, PAIRS], y: [-0.5, 2.5], ticks: [0, 500, 1000], label: "pairs", lines, now: t });
    const grid = Array.from({ length: 301 }, (_, i) => -0.5 + i / 100),
      names = [
        [-1, "−1"],
        [0, "0"],
        [1, "1"],
      ];
    const push = name => ({ ...style(name), points: grid.map(z => [z, pushes(state(), 10 ** z)[name]]) });
    const now = { colour: ink("psgd"), dots: 3.5, points: found.map(run => [Math.log10(run[t]), 0]) };
    chart($(".lv-push"), ink, {
      title: "mean push down on P: by signs, by gradients",
      x: [-0.5, 2.5],
      y: [-1.15, 1.15],
      ticks: [0, 1, 2.5],
      tick: v => (v === 2.5 ? "P" : power(v)),
      names,
      lines: [push("often"), push("best"), now],
    });
    const mean = 10 ** (found.reduce((sum, run) => sum + Math.log10(run[t]), 0) / RUNS);
    const number = v => (v < 10 ? v.toPrecision(2) : v.toFixed(0));
    const text = `After ${t} pairs the mean of P is ${number(mean)}; the criterion asks for ${number(end.best)}, and the median of |v/h| is ${number(end.often)}.`;
    tell($(".lv-say"), text);
    $(".lv-runs").setAttribute("aria-label", `P of twelve runs against the pairs. ${text}`);
    $(".lv-push").setAttribute(
      "aria-label",
      `The mean push on P against P, by signs a staircase and by gradients a smooth curve; each is zero where its rule rests. ${text}`,
    );
  }
  agree($(".lv-agrees"), check(get("check")));
  const stop = watch(el, model, KEYS, { compute, draw });
  return () => {
    parts[4].pause();
    stop();
  };
}
export default { render };
