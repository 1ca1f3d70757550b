// Recorded runs: choose a problem, methods and seeds, how far to smooth, and what is counted.
import { add, agree, chart, choice, difference, inks, mount, put, slider, watch } from "./kit.js";

const FIRST_ORDER = ["sgd", "rmsprop", "adam"];
const FORMS = ["dense", "kron", "splu", "scan", "esgd"];

/** The mean of the last values at each place; what is missing stays missing. */
export function smooth(values, span) {
  return values.map((_, i) => {
    const last = values.slice(Math.max(0, i + 1 - span), i + 1);
    return last.includes(null) ? NaN : last.reduce((sum, x) => sum + x, 0) / last.length;
  });
}

/** The largest difference from the library's means. */
export const check = ({ cases }) => Math.max(...cases.map(({ values, span, means }) => difference(smooth(values, span), means)));

/** The colour and dash of a method; what is unusual about a run only changes the dash. */
function look(method, ink) {
  const [name, ...unusual] = method.split("-"),
    mix = (a, b, share) => `color-mix(in srgb, ${ink(a)} ${share}%, ${ink(b)})`;
  const colours = {
    sgd: ink("sgd"),
    rmsprop: ink("adam"),
    adam: ink("adam"),
    dense: mix("psgd", "ink", 45),
    kron: ink("psgd"),
    splu: ink("other"),
    scan: mix("psgd", "bg", 62),
    esgd: ink("third"),
  };
  const mark = [...unusual.join()].reduce((sum, letter) => (31 * sum + letter.charCodeAt(0)) % 997, 0);
  const dash = unusual.length ? [1 + (mark % 7), 2 + (mark % 3)] : ({ rmsprop: [4, 3], scan: [8, 3], esgd: [9, 3, 2, 3] }[name] ?? []);
  return { colour: colours[name] ?? ink("ink"), dash, width: 1.6 };
}

const round = x => (Math.abs(x) < 0.01 || Math.abs(x) >= 1e4 ? x.toExponential(1) : x.toPrecision(2));

/** A box to tick for each option of a setting that is a list; the options may change. */
function boxes(into, model, { legend, key, options, show = String, colour }) {
  const group = add(into, "fieldset", { className: `lv-${key}` }, add(document.createElement("i"), "legend", { textContent: legend }));
  let there = "";
  const build = all => {
    for (const label of [...group.querySelectorAll("label")]) label.remove();
    for (const value of all) {
      const input = Object.assign(document.createElement("input"), { type: "checkbox", value });
      const label = add(group, "label", {}, input);
      if (colour)
        label.insertAdjacentHTML(
          "beforeend",
          `<svg class="lv-key" viewBox="0 0 24 10" aria-hidden="true"><path d="M0 5H24" fill="none" stroke-width="3"/></svg>`,
        );
      label.append(show(value));
      input.addEventListener("change", () => {
        const kept = model.get(key).filter(other => String(other) !== String(value));
        put(model, { [key]: input.checked ? [...kept, value] : kept });
      });
    }
    there = String(all);
  };
  return {
    sync() {
      const all = options();
      if (String(all) !== there) build(all);
      [...group.querySelectorAll("label")].forEach((label, i) => {
        label.firstChild.checked = model.get(key).map(String).includes(String(all[i]));
        const path = label.querySelector("path");
        if (path) {
          path.setAttribute("stroke", colour(all[i]).colour);
          path.setAttribute("stroke-dasharray", colour(all[i]).dash.join(" "));
        }
      });
    },
  };
}

export function render({ model, el }) {
  const $ = mount(
    el,
    `<div class="lv-bar lv-top"></div><div class="lv-bar lv-which"></div>
<div class="lv-side"><canvas class="lv-runs" role="img"></canvas></div>
<div class="lv-bar lv-below"></div><div class="lv-sliders"></div><p class="lv-say" aria-live="polite"></p><p class="lv-agrees"></p>`,
  );
  const get = key => model.get(key),
    runs = get("runs");
  const of = (key, some = runs) => [...new Set(some.map(run => run[key]))];
  const here = () => runs.filter(run => run.problem === get("problem"));
  const rank = method => [...FORMS, ...FIRST_ORDER].indexOf(method.split("-")[0]) + (method.includes("-") ? 0.5 : 0);
  const names = list => Object.fromEntries(list.map(name => [name, name]));
  let ink = inks(el);
  const parts = [
    choice($(".lv-top"), model, { legend: "problem", key: "problem", options: names(of("problem")) }),
    boxes($(".lv-which"), model, {
      legend: "methods",
      key: "methods",
      options: () => of("method", here()).sort((a, b) => rank(a) - rank(b)),
      colour: method => look(method, ink),
    }),
    boxes($(".lv-below"), model, { legend: "seeds", key: "seeds", options: () => of("seed", here()).sort() }),
    choice($(".lv-below"), model, { legend: "shown", key: "quantity", options: names(["test error", "training loss"]) }),
    choice($(".lv-below"), model, { legend: "counted in", key: "axis", options: names(["steps", "gradients", "seconds"]) }),
    slider($(".lv-sliders"), model, {
      name: "smoothing",
      key: "span",
      to: s => 1 + Math.round(s * 0.29),
      from: v => (v - 1) / 0.29,
      show: v => (v === 1 ? "none" : `${v} points`),
    }),
  ];
  function draw() {
    ink = inks(el);
    for (const part of parts) part.sync();
    const axis = get("axis"),
      shown = here().filter(run => get("methods").includes(run.method) && get("seeds").includes(run.seed));
    const along = run => (axis === "gradients" ? run.gradients : axis === "seconds" ? run.steps.map(t => (t * run.ms) / 1000) : run.steps);
    const curves = shown.map(run => ({ run, x: along(run), y: smooth(run[get("quantity")], get("span")) }));
    const heights = curves.flatMap(({ y }) => y.filter(v => v > 0).map(Math.log10));
    const low = heights.length ? Math.floor(Math.min(...heights)) : -3,
      high = heights.length ? Math.max(low + 1, Math.ceil(Math.max(...heights))) : 0;
    const end = Math.max(1, ...curves.map(({ x }) => Math.round(x.at(-1)))),
      unit = 10 ** Math.floor(Math.log10(end));
    const tick = [0.2, 0.5, 1, 2, 5].map(k => k * unit).find(size => size >= end / 4.5);
    const ticks = [0, ...[1, 2, 3, 4].map(k => k * tick).filter(t => t < 0.75 * end), end];
    chart($(".lv-runs"), ink, {
      title: `${get("quantity")}, ${get("problem")}`,
      x: [0, end],
      y: [low, high],
      ticks,
      label: axis,
      lines: curves.map(({ run, x, y }) => ({ points: x.map((t, i) => [t, y[i] > 0 ? Math.log10(y[i]) : NaN]), ...look(run.method, ink) })),
    });
    const last = curves.map(({ run, y }) => [run.method, run.seed, y.at(-1)]);
    const ends = get("methods")
      .filter(m => last.some(([method]) => method === m))
      .map(
        m =>
          `${m} ${last
            .filter(([method]) => method === m)
            .sort((a, b) => a[1] - b[1])
            .map(([, , v]) => (Number.isNaN(v) ? "lost" : round(v)))
            .join(" / ")}`,
      );
    const text = ends.length ? `At the end, a number for each seed: ${ends.join(", ")}.` : "No run is chosen.";
    if ($(".lv-say").textContent !== text) $(".lv-say").textContent = text;
    $(".lv-runs").setAttribute("aria-label", `Curves of ${get("quantity")} on ${get("problem")}, counted in ${axis}. ${text}`);
  }
  agree($(".lv-agrees"), check(get("check")));
  return watch(el, model, ["problem", "methods", "seeds", "quantity", "axis", "span"], { compute() {}, draw });
}
export default { render };
