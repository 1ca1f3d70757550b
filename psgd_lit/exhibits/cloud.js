// SCAN and batch normalisation on a cloud of inputs: what a scale and a shift for each input can undo.
import { diagonal, falling, fit, PATTERNS, spectrum, spread } from "./algebra.js";
import { agree, chart, crosses, difference, dots, grip, inks, legend, mount, normals, note, put, scales, sheet, slider, stroke, tell, watch } from "./kit.js";

const BOX = [-4, 4, -4, 4],
  POINTS = 150,
  UPDATES = 200;
const FORMS = {
  // of Q: the colour, the dashes and the words of each
  none: { colour: "sgd", dash: [6, 4], words: "inputs as they are" },
  diagonal: { colour: "sparse", words: "the best diagonal" },
  batch: { colour: "other", dash: [3, 3], words: "batch normalisation" },
  scan: { colour: "psgd", words: "SCAN, learned" },
};
const KEYS = ["start", "wide", "correlation"];
const RATES = falling(UPDATES);

/** E[x x^T] of inputs x = (x1, x2, 1) with these means, the scales `wide` and 1, and this correlation. */
export function moment({ start: [a, b], wide, correlation }) {
  return [
    [wide * wide + a * a, wide * correlation + a * b, a],
    [wide * correlation + a * b, 1 + b * b, b],
    [a, b, 1],
  ];
}

/** For each form its Q, and the eigenvalues of P H for the Hessian of a layer with these inputs and a squared loss. */
export function forms(state, rates = RATES) {
  const H = moment(state),
    {
      start: [a, b],
      wide,
    } = state,
    Q = {
      none: diagonal([1, 1, 1]),
      diagonal: diagonal(H.map(row => 1 / Math.sqrt(Math.hypot(...row)))),
      batch: [
        [1 / wide, 0, -a / wide],
        [0, 1, -b],
        [0, 0, 1],
      ],
      scan: fit(H, [3], [PATTERNS.column], rates),
    };
  return Object.fromEntries(Object.entries(Q).map(([name, q]) => [name, { Q: q, values: spectrum(q, H) }]));
}

/** The largest difference from the library's numbers. */
export const check = ({ cases }) =>
  Math.max(
    ...cases.map(({ state, updates, found }) => {
      const mine = forms(state, RATES.slice(0, updates));
      return Math.max(...Object.entries(found).flatMap(([name, { Q, values }]) => [difference(mine[name].Q, Q), difference(mine[name].values, values)]));
    }),
  );

export function render({ model, el }) {
  const $ = mount(
    el,
    `<div class="lv-pair"><div class="lv-stage"><canvas class="lv-map" role="img"></canvas></div>
<div class="lv-side"><canvas class="lv-after" role="img"></canvas><canvas class="lv-spread" role="img"></canvas></div></div>
<div class="lv-bar lv-legend"></div><div class="lv-sliders"></div><p class="lv-say" aria-live="polite"></p><p class="lv-agrees"></p>`,
  );
  const get = key => model.get(key),
    state = () => Object.fromEntries(KEYS.map(key => [key, get(key)]));
  const normal = normals(7),
    noise = Array.from({ length: POINTS }, () => [normal(), normal()]);
  let ink = inks(el),
    found = null,
    sweep = null,
    cloud = null;
  legend($(".lv-legend"), FORMS);
  const parts = [
    slider($(".lv-sliders"), model, {
      name: "scale of x₁",
      key: "wide",
      to: s => 10 ** (-0.7 + 0.014 * s),
      from: v => (Math.log10(v) + 0.7) / 0.014,
      show: v => v.toPrecision(2),
    }),
    slider($(".lv-sliders"), model, { name: "correlation", key: "correlation", to: s => (s - 50) * 0.019, from: v => 50 + v / 0.019, show: v => v.toFixed(2) }),
    grip($(".lv-stage"), { name: "Mean of the inputs", box: () => BOX, get: () => get("start"), set: start => put(model, { start }) }),
  ];
  function compute() {
    ink = inks(el);
    const {
        start: [a, b],
        wide,
        correlation,
      } = state(),
      other = Math.sqrt(1 - correlation * correlation);
    found = forms(state());
    cloud = noise.map(([z, w]) => [a + wide * z, b + correlation * z + other * w]);
    sweep = Array.from({ length: 39 }, (_, i) => (i - 19) / 20).map(r => [r, forms({ ...state(), correlation: r })]);
  }
  const axes = (c, to, [l, r, b, t]) => {
    for (const ends of [
      [
        [l, 0],
        [r, 0],
      ],
      [
        [0, b],
        [0, t],
      ],
    ])
      stroke(c, ends.map(to), { colour: ink("line"), width: 1 });
  };
  function drawMap() {
    const [c, w, h] = sheet($(".lv-map")),
      [to] = scales(BOX, w, h);
    axes(c, to, BOX);
    c.strokeStyle = ink("line");
    c.strokeRect(0.5, 0.5, w - 1, h - 1);
    dots(c, cloud.map(to), ink("sgd"), 2.4);
    const [X, Y] = to(get("start"));
    note(c, "drag me", X, Y - 18, ink, "center");
    note(c, "inputs x₁, x₂", 8, 16, ink);
  }
  function drawAfter() {
    const [c, w, h] = sheet($(".lv-after")),
      box = [-7, 7, (-7 * h) / w, (7 * h) / w],
      [to] = scales(box, w, h);
    axes(c, to, box);
    for (const [name, radius] of [
      ["batch", 3.4],
      ["scan", 2],
    ]) {
      const { Q } = found[name],
        map = ([x, y]) => [0, 1].map(i => (Q[i][0] * x + Q[i][1] * y + Q[i][2]) / Q[2][2]);
      dots(c, cloud.map(map).map(to), ink(FORMS[name].colour), radius);
      crosses(c, [to(map(get("start")))], ink(FORMS[name].colour));
    }
    note(c, "after batch normalisation, and after SCAN", 8, 16, ink);
  }
  function drawSpread() {
    const lines = Object.entries(FORMS).flatMap(([name, { colour, dash }]) => {
      const style = { colour: ink(colour), dash, width: 2.2 },
        value = all => Math.log10(spread(all[name].values));
      return [
        { ...style, points: sweep.map(([r, all]) => [r, value(all)]) },
        { ...style, dots: 4.5, points: [[get("correlation"), value(found)]] },
      ];
    });
    chart($(".lv-spread"), ink, {
      title: "largest over smallest eigenvalue of PH",
      x: [-1, 1],
      y: [-0.1, 3.6],
      ticks: [-1, 0, 1],
      label: "correlation",
      lines,
    });
  }
  function draw() {
    for (const part of parts) part.sync();
    drawMap();
    drawAfter();
    drawSpread();
    const ratio = name => spread(found[name].values).toPrecision(3);
    const text = `The largest eigenvalue of PH is ${ratio("none")} times the smallest for the inputs as they are, ${ratio("diagonal")} times with the best diagonal, ${ratio("batch")} times with batch normalisation and ${ratio("scan")} times with SCAN.`;
    tell($(".lv-say"), text);
    $(".lv-map").setAttribute("aria-label", `A cloud of inputs around a mean that can be dragged. ${text}`);
    $(".lv-after").setAttribute("aria-label", `The same cloud after batch normalisation and after SCAN. ${text}`);
    $(".lv-spread").setAttribute("aria-label", `The ratio of the eigenvalues of PH against the correlation of the inputs, for four forms. ${text}`);
  }
  agree($(".lv-agrees"), check(get("check")));
  return watch(el, model, KEYS, { compute, draw });
}
export default { render };
