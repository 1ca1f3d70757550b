// What all exhibits share: random numbers, pictures, controls. No framework, no request.

/** Standard normal numbers from a seed, by mulberry32 and Box-Muller; psgd_lit.exhibit.normals draws the same. */
export function normals(seed) {
  let a = seed >>> 0;
  const uniform = () => {
    a = (a + 0x6d2b79f5) >>> 0;
    let t = Math.imul(a ^ (a >>> 15), 1 | a);
    t = (t + Math.imul(t ^ (t >>> 7), 61 | t)) ^ t;
    return ((t ^ (t >>> 14)) >>> 0) / 4294967296;
  };
  return () => Math.sqrt(-2 * Math.log(1 - uniform())) * Math.cos(2 * Math.PI * uniform());
}

/** The largest difference between two nested lists of numbers, relative where a number is above 1. */
export function difference(mine, theirs) {
  if (!Array.isArray(theirs)) return Math.abs(mine - theirs) / Math.max(1, Math.abs(theirs));
  if (mine.length !== theirs.length) return Infinity;
  return theirs.reduce((most, other, i) => Math.max(most, difference(mine[i], other)), 0);
}

const STYLE = `
.psgd-live{--ink:var(--pst-color-text-base,var(--jp-content-font-color1,#222832));--soft:var(--pst-color-text-muted,
var(--jp-content-font-color2,#48566b));--line:var(--pst-color-border,var(--jp-border-color1,#c9cdd3));
--bg:var(--pst-color-background,var(--jp-layout-color0,#fff));--sgd:#7d7d7d;--momentum:#555;--adam:#b87400;
--newton:#b2182b;--psgd:#0072b2;--sparse:#3d94cc;--other:#1b7f4b;--third:#7b3fa0;--low:#fff;--high:#b0cde2;color:var(--ink);font-size:.875rem;
line-height:1.4;margin:.25rem 0 1.25rem}
html[data-theme=dark] .psgd-live,body[data-jp-theme-light=false] .psgd-live{--sgd:#a9a9a9;--momentum:#d0d0d0;
--adam:#f0b429;--newton:#f4737f;--psgd:#58b0ee;--sparse:#a6d3f5;--other:#5fce93;--third:#c79be8;--low:#18222e;--high:#42607c}
html[data-theme=dark] .text_html:has(.psgd-live){background:transparent!important;color:inherit!important;padding:0!important}
.psgd-live .lv-pair{display:grid;grid-template-columns:minmax(0,1.06fr) minmax(0,1fr);gap:.9rem}
.psgd-live .lv-pair .lv-player{grid-column:1/-1}.psgd-live .lv-player .lv-bar{margin:0 0 .4rem}
.psgd-live .lv-side{display:grid;gap:.5rem;align-content:space-between}
.psgd-live canvas{display:block;width:100%;height:auto;border-radius:4px}
.psgd-live .lv-stage{position:relative;align-self:start;overflow:hidden}.psgd-live .lv-stage canvas{aspect-ratio:1;cursor:crosshair}
.psgd-live .lv-side canvas{aspect-ratio:1.94}.psgd-live .lv-wide canvas{aspect-ratio:1.5}.psgd-live .lv-tall.lv-side canvas{aspect-ratio:.94}.psgd-live .lv-large{max-width:34rem}
.psgd-live .lv-grip{position:absolute;width:2.75rem;height:2.75rem;margin:-1.375rem;padding:0;border:0;background:transparent;
border-radius:50%;cursor:grab;touch-action:none}
.psgd-live .lv-grip::after{content:"";position:absolute;inset:.8rem;border:3px solid var(--ink);border-radius:50%;background:var(--bg)}
.psgd-live .lv-grip:focus-visible{outline:3px solid var(--ink);outline-offset:-4px}
.psgd-live .lv-bar{display:flex;flex-wrap:wrap;gap:.25rem 1.1rem;align-items:center;margin:.4rem 0}
.psgd-live fieldset{display:flex;flex-wrap:wrap;gap:.1rem .2rem;border:0;margin:0;padding:0;min-width:0}
.psgd-live legend{float:left;font-size:inherit;margin:0 .4rem 0 0;width:auto;padding:.2rem 0}
.psgd-live .lv-surface legend{position:absolute;clip-path:inset(50%)}
.psgd-live .lv-sliders .lv-button{justify-self:start;align-self:center}
.psgd-live label{display:inline-flex;gap:.35rem;align-items:center;margin:0;min-height:1.75rem}
.psgd-live fieldset label{padding:0 .55rem;border:1px solid var(--line);border-radius:5px;cursor:pointer}
.psgd-live fieldset label:has(:checked){border-color:var(--psgd);box-shadow:inset 0 0 0 1px var(--psgd)}
.psgd-live input{accent-color:var(--psgd);margin:0}.psgd-live input[type=range]{width:100%;min-width:0}
.psgd-live .lv-sliders{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(16rem,100%),1fr));gap:0 1.4rem}
.psgd-live .lv-sliders label{display:grid;grid-template-columns:6.5rem minmax(0,1fr) 3.6rem}
.psgd-live output{font-variant-numeric:tabular-nums;text-align:right}
.psgd-live button.lv-button{font:inherit;padding:.15rem .65rem;min-height:1.75rem;border:1px solid var(--line);border-radius:5px;
background:transparent;color:inherit;cursor:pointer}.psgd-live button.lv-button:hover{border-color:var(--ink)}
.psgd-live .lv-time{flex:1 1 9rem}.psgd-live .lv-time output{min-width:6.4rem}
.psgd-live .lv-say{margin:.3rem 0 0;min-height:2.8em}.psgd-live .lv-agrees{margin:.15rem 0 0;color:var(--soft);font-size:.8rem}
.psgd-live .lv-cells{align-self:start;display:grid;touch-action:pan-y;border:1px solid var(--line)}
.psgd-live .lv-line{display:grid;grid-template-columns:repeat(8,1fr)}.psgd-live .lv-cell{aspect-ratio:1;display:grid;place-items:center;cursor:cell;
box-shadow:inset 0 0 0 .5px var(--line)}.psgd-live .lv-cell:focus-visible{outline:3px solid var(--ink);outline-offset:-3px}
.psgd-live svg.lv-key{width:1.6em;height:.7em}
@media(max-width:600px){.psgd-live .lv-pair{grid-template-columns:minmax(0,1fr)}.psgd-live .lv-side{order:1}}`;

/** Fill an element with the style and the parts of an exhibit; returns a function that finds a part. */
export function mount(el, html) {
  el.classList.add("psgd-live");
  el.innerHTML = `<style>${STYLE}</style>${html}`;
  return name => el.querySelector(name);
}

/** Add an element with properties, and return it. */
export function add(parent, tag, properties = {}, ...children) {
  const node = Object.assign(document.createElement(tag), properties);
  node.append(...children);
  parent.append(node);
  return node;
}

/** The colours of an exhibit in the theme that is on, by name. */
export const inks = el => {
  const style = getComputedStyle(el);
  return name => style.getPropertyValue(`--${name}`).trim();
};

/** A cleared canvas at the resolution of the screen: its context, width and height in CSS pixels. */
export function sheet(canvas) {
  const ratio = devicePixelRatio || 1,
    { clientWidth: w, clientHeight: h } = canvas,
    c = canvas.getContext("2d");
  if (canvas.width !== Math.round(w * ratio) || canvas.height !== Math.round(h * ratio)) {
    canvas.width = Math.round(w * ratio);
    canvas.height = Math.round(h * ratio);
  }
  c.setTransform(ratio, 0, 0, ratio, 0, 0);
  c.clearRect(0, 0, w, h);
  c.font = "12px system-ui, sans-serif";
  c.lineJoin = "round";
  return [c, w, h];
}

/** Map a box [left, right, bottom, top] of the plane onto w x h pixels, and back. */
export const scales = ([l, r, b, t], w, h) => [
  ([x, y]) => [((x - l) / (r - l)) * w, ((t - y) / (t - b)) * h],
  (x, y) => [l + (x / w) * (r - l), t - (y / h) * (t - b)],
];

export function stroke(c, points, { colour, width = 1.6, dash = [] }) {
  c.strokeStyle = colour;
  c.lineWidth = width;
  c.setLineDash(dash);
  c.beginPath();
  let pen = false;
  for (const [x, y] of points) {
    if (Number.isFinite(y)) pen ? c.lineTo(x, y) : c.moveTo(x, y);
    pen = Number.isFinite(y);
  }
  c.stroke();
  c.setLineDash([]);
}

/** Words on a picture, legible on any ground. */
export function note(c, text, x, y, ink, align = "left") {
  c.textAlign = align;
  c.lineWidth = 4;
  c.strokeStyle = ink("bg");
  c.strokeText(text, x, y);
  c.fillStyle = ink("ink");
  c.fillText(text, x, y);
  c.textAlign = "left";
}

export function arrow(c, [x, y], [u, v], colour, width = 2.2) {
  const length = Math.hypot(u - x, v - y),
    k = Math.min(9, length),
    a = (u - x) / (length || 1),
    b = (v - y) / (length || 1);
  stroke(
    c,
    [
      [x, y],
      [u, v],
    ],
    { colour, width },
  );
  stroke(
    c,
    [
      [u - k * (a + b * 0.5), v - k * (b - a * 0.5)],
      [u, v],
      [u - k * (a - b * 0.5), v - k * (b + a * 0.5)],
    ],
    { colour, width },
  );
}

export const power = e => `10${String(e).replace(/[-0-9]/g, d => "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"["-0123456789".indexOf(d)])}`;

/** What lines mean: their colour, dashes and words. */
export function legend(into, entries) {
  into.innerHTML = Object.values(entries)
    .map(
      ({ colour, dash = [], words }) =>
        `<span><svg class="lv-key" viewBox="0 0 24 10" aria-hidden="true"><path d="M0 5H24" stroke="var(--${colour})" stroke-width="3" stroke-dasharray="${dash}"/></svg> ${words}</span>`,
    )
    .join("");
}

/** A cross at each of these pixels. */
export function crosses(c, places, colour, size = 7) {
  for (const [X, Y] of places)
    for (const [i, j] of [
      [size, 0],
      [0, size],
    ])
      stroke(
        c,
        [
          [X - i, Y - j],
          [X + i, Y + j],
        ],
        { colour },
      );
}

/** Say a text, unless it is said already. */
export function tell(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** A chart: lines of { points: [[x, y], ...] }, or dots; powers of ten upwards, or what `names` maps levels to. */
export function chart(canvas, ink, { title, x: [from, to], y: [low, high], ticks, tick = v => `${v}`, label = "", lines, rule, now, names }) {
  const [c, w, h] = sheet(canvas),
    left = 38,
    right = w - 8,
    top = 20,
    bottom = h - 20;
  const X = v => left + ((v - from) / (to - from)) * (right - left),
    Y = v => top + ((high - v) / (high - low)) * (bottom - top);
  const every = Math.max(1, Math.round((high - low) / 5)),
    levels = [];
  for (let e = Math.ceil(low / every) * every; e <= high; e += every) levels.push([e, power(e)]);
  c.fillStyle = ink("ink");
  c.fillText(title, left, 12);
  c.fillStyle = ink("soft");
  for (const [e, words] of names ?? levels) {
    stroke(
      c,
      [
        [left, Y(e)],
        [right, Y(e)],
      ],
      { colour: ink("line"), width: 1 },
    );
    c.textAlign = "right";
    c.fillText(words, left - 5, Y(e) + 4);
  }
  for (const v of ticks) {
    c.textAlign = v === to ? "right" : v === from ? "left" : "center";
    c.fillText(v === to ? `${tick(v)} ${label}`.trim() : tick(v), v === to ? right + 4 : v === from ? left - 4 : X(v), h - 4);
  }
  c.textAlign = "left";
  if (rule !== undefined)
    stroke(
      c,
      [
        [left, Y(rule)],
        [right, Y(rule)],
      ],
      { colour: ink("ink"), width: 1, dash: [5, 4] },
    );
  c.save();
  c.beginPath();
  c.rect(left - 6, top - 2, right - left + 12, bottom - top + 4);
  c.clip();
  for (const line of lines) {
    const points = line.points.map(([a, b]) => [X(a), Y(b)]);
    c.globalAlpha = now === undefined ? 1 : 0.4; // what is still to come is faint
    line.dots ? dots(c, points, line.colour, line.dots) : stroke(c, points, line);
    c.globalAlpha = 1;
    if (now !== undefined)
      stroke(
        c,
        points.filter(([a]) => a <= X(now) + 0.01),
        line,
      );
  }
  if (now !== undefined)
    stroke(
      c,
      [
        [X(now), top],
        [X(now), bottom],
      ],
      { colour: ink("soft"), width: 1 },
    );
  c.restore();
}

export function dots(c, points, colour, radius) {
  c.fillStyle = colour;
  for (const [x, y] of points) {
    c.beginPath();
    c.arc(x, y, radius, 0, 7);
    c.fill();
  }
}

/** A picture of a function on a box: bands of its square root, light at the floor. */
export function terrain(f, [l, r, b, t], floor, ink, { bands = 14, bend = 1, n = 200 } = {}) {
  const tones = ["low", "high"].map(name => ink(name).match(/[0-9a-f]/gi)).map(d => (d.length === 3 ? d.flatMap(x => [x, x]) : d));
  const [lo, hi] = tones.map(d => [0, 2, 4].map(i => parseInt(d[i] + d[i + 1], 16)));
  const heights = Float64Array.from({ length: n * n }, (_, k) =>
    Math.sqrt(Math.max(0, f(l + (((k % n) + 0.5) / n) * (r - l), t - ((Math.floor(k / n) + 0.5) / n) * (t - b)) - floor)),
  );
  const top = heights.reduce((a, z) => Math.max(a, z), 0) || 1,
    image = new ImageData(n, n);
  heights.forEach((z, k) => {
    const s = Math.min(1, Math.floor((z / top) ** bend * bands) / bands);
    image.data.set([...lo.map((from, i) => from + (hi[i] - from) * s), 255], 4 * k);
  });
  const canvas = Object.assign(document.createElement("canvas"), { width: n, height: n });
  canvas.getContext("2d").putImageData(image, 0, 0);
  return canvas;
}

/** A labelled slider for one setting of the model; `to` and `from` map its 0 to 100 to the value and back. */
export function slider(into, model, { name, key, to, from, show }) {
  const input = Object.assign(document.createElement("input"), { type: "range", min: 0, max: 100, step: 0.5 });
  const output = document.createElement("output");
  const label = add(into, "label", { className: `lv-${key}` }, add(document.createElement("i"), "span", { textContent: name }), input, output);
  input.addEventListener("input", () => put(model, { [key]: to(input.valueAsNumber) }));
  return {
    label,
    sync() {
      if (Math.abs(to(input.valueAsNumber) - model.get(key)) > 1e-12) input.value = from(model.get(key));
      output.textContent = show(model.get(key));
      input.setAttribute("aria-valuetext", output.textContent);
    },
  };
}

/** Radio buttons for one setting; `options` maps values to words, and `chosen` may set more than that one. */
export function choice(into, model, { legend, key, options, chosen = value => ({ [key]: value }) }) {
  const group = add(into, "fieldset", { className: `lv-${key}` }, add(document.createElement("i"), "legend", { textContent: legend }));
  const name = `lv-${Math.random().toString(36).slice(2)}`;
  const inputs = Object.entries(options).map(([value, words]) => {
    const input = Object.assign(document.createElement("input"), { type: "radio", name, value });
    input.addEventListener("change", () => put(model, chosen(value)));
    add(group, "label", {}, input, words);
    return input;
  });
  return {
    sync: () =>
      inputs.forEach(input => {
        input.checked = input.value === model.get(key);
      }),
  };
}

export function put(model, values) {
  for (const [key, value] of Object.entries(values)) model.set(key, value);
  model.save_changes();
}

/** Play, one step, back to the start, and a slider of time over the setting `t` of the model. */
export function player(into, model, { last, show, say, seconds = 4 }) {
  const still = matchMedia("(prefers-reduced-motion: reduce)");
  const bar = add(into, "div", { className: "lv-bar" });
  const button = (text, act) => {
    const node = add(bar, "button", { type: "button", className: "lv-button", textContent: text });
    node.addEventListener("click", act);
    return node;
  };
  let frame = 0,
    begun = 0,
    first = 0;
  const go = t => put(model, { t: Math.max(0, Math.min(last(), t)) });
  const pause = () => {
    cancelAnimationFrame(frame);
    frame = 0;
    play.textContent = "▶ Play";
    say.setAttribute("aria-live", "polite");
  };
  const tick = now => {
    const t = Math.min(last(), first + Math.floor(((now - begun) / 1000) * (last() / seconds)));
    frame = t < last() ? requestAnimationFrame(tick) : 0;
    go(t);
    if (!frame) pause();
  };
  const start = () => {
    if (still.matches) return go(last()); // nothing moves by itself: the end is shown at once
    first = model.get("t") >= last() ? 0 : model.get("t");
    begun = performance.now();
    say.setAttribute("aria-live", "off");
    play.textContent = "❚❚ Pause";
    frame = requestAnimationFrame(tick);
  };
  const hand = t => {
    pause();
    go(t);
  };
  const play = button("▶ Play", () => (frame ? pause() : start()));
  button("Step", () => hand(model.get("t") >= last() ? 0 : model.get("t") + 1));
  button("Reset", () => hand(0));
  const range = Object.assign(document.createElement("input"), { type: "range", min: 0, step: 1 });
  const output = document.createElement("output");
  add(bar, "label", { className: "lv-time" }, add(document.createElement("i"), "span", { textContent: "time" }), range, output);
  range.addEventListener("input", () => hand(range.valueAsNumber));
  return {
    pause,
    start,
    still: () => still.matches,
    sync() {
      range.max = last();
      range.value = model.get("t");
      output.textContent = show(model.get("t"));
      range.setAttribute("aria-valuetext", output.textContent);
    },
  };
}

/** A point of the plane that mouse, finger and arrow keys move; a click beside it brings it there. */
export function grip(stage, { name, box, get, set }) {
  const handle = add(stage, "div", { className: "lv-grip", tabIndex: 0, role: "slider" });
  for (const [key, value] of Object.entries({ role: "slider", "aria-label": `${name}; arrow keys move it`, "aria-orientation": "horizontal" }))
    handle.setAttribute(key, value);
  const canvas = stage.querySelector("canvas");
  const inside = ([x, y]) => {
    const [l, r, b, t] = box();
    return [Math.max(l, Math.min(r, x)), Math.max(b, Math.min(t, y))];
  };
  const follow = event => {
    const place = canvas.getBoundingClientRect();
    set(inside(scales(box(), place.width, place.height)[1](event.clientX - place.left, event.clientY - place.top)));
  };
  for (const node of [handle, canvas]) {
    let held = false;
    node.addEventListener("pointerdown", event => {
      if (event.button || (node === canvas && event.pointerType === "touch")) return; // a finger on the map scrolls the page
      event.preventDefault();
      handle.focus({ preventScroll: true });
      node.setPointerCapture(event.pointerId);
      held = true;
      follow(event);
    });
    node.addEventListener("pointermove", event => held && follow(event));
    for (const end of ["pointerup", "pointercancel"])
      node.addEventListener(end, () => {
        held = false;
      });
  }
  canvas.addEventListener("click", follow);
  handle.addEventListener("keydown", event => {
    const way = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, 1], ArrowDown: [0, -1] }[event.key];
    if (!way) return;
    event.preventDefault();
    const [l, r] = box(),
      size = ((r - l) / 80) * (event.shiftKey ? 5 : 1),
      [x, y] = get();
    set(inside([x + size * way[0], y + size * way[1]]));
  });
  return {
    sync() {
      const [x, y] = scales(box(), 100, 100)[0](get()),
        [l, r] = box();
      Object.assign(handle.style, { left: `${x}%`, top: `${y}%` });
      const numbers = get().map(v => v.toFixed(2));
      const values = { valuemin: l, valuemax: r, valuenow: numbers[0], valuetext: `x ${numbers[0]}, y ${numbers[1]}` };
      for (const [key, value] of Object.entries(values)) handle.setAttribute(`aria-${key}`, value);
    },
  };
}

/** Say how far this page's numbers are from those that the library has computed. */
export function agree(into, found) {
  into.dataset.difference = found;
  into.textContent =
    found < 1e-9
      ? `This page's arithmetic agrees with psgd_lit to ${found === 0 ? "the last bit" : found.toExponential(0)}.`
      : `This page's arithmetic differs from psgd_lit by ${found.toExponential(0)}: don't trust it.`;
}

/** Compute and draw once a frame after something has changed: a setting, the theme, the width. Returns how to stop. */
export function watch(el, model, keys, { compute, draw }) {
  let frame = 0,
    stale = true;
  const run = () => {
    frame = 0;
    if (!el.isConnected) return; // without a style there are no colours; the first size that is seen asks again
    if (stale) compute();
    stale = false;
    draw();
  };
  const ask = changed => {
    stale ||= changed;
    frame ||= requestAnimationFrame(run);
  };
  const heard = { t: () => ask(false), ...Object.fromEntries(keys.map(key => [key, () => ask(true)])) };
  for (const key in heard) model.on(`change:${key}`, heard[key]);
  const theme = new MutationObserver(() => ask(true)),
    size = new ResizeObserver(() => ask(false));
  theme.observe(document.documentElement, { attributeFilter: ["data-theme"] });
  theme.observe(document.body, { attributeFilter: ["data-jp-theme-light"] });
  size.observe(el);
  run();
  return () => {
    cancelAnimationFrame(frame);
    theme.disconnect();
    size.disconnect();
    for (const key in heard) model.off(`change:${key}`, heard[key]);
  };
}
