// A saddle by hand: from each point, where Newton's steps go, and where those of the inverse of |H| go.
import { agree, arrow, crosses, difference, grip, inks, mount, note, put, scales, sheet, slider, stroke, tell, terrain, watch } from "./kit.js";

const BOX = [-2, 2, -2, 2],
  REACH = 0.5,
  STEPS = 30;

/** The loss w^2 / 2 + k (u^2 - 1)^2 / 4, its gradient and the curvature along u, in axes u, w turned by the angle. */
export function saddle({ condition, angle }) {
  const c = Math.cos(angle),
    s = Math.sin(angle),
    k = 1 / condition;
  const turn = (x, y) => [c * x + s * y, c * y - s * x],
    back = (u, w) => [c * u - s * w, s * u + c * w];
  const parts = (x, y) => {
    const [u, w] = turn(x, y);
    return { g: [k * (u * u * u - u), w], along: k * (3 * u * u - 1) };
  };
  return {
    f: (x, y) => {
      const [u, w] = turn(x, y);
      return (w * w) / 2 + (k * (u * u - 1) ** 2) / 4;
    },
    move: (x, y, sign) => {
      const { g, along } = parts(x, y);
      return back(-g[0] / (sign ? Math.abs(along) : along), -g[1]);
    },
    down: (x, y) => {
      const { g } = parts(x, y);
      return back(-g[0], -g[1]);
    },
    climbs: (x, y) => {
      const { g, along } = parts(x, y);
      return (g[0] * g[0]) / along + g[1] * g[1] < 0;
    },
    minima: [back(1, 0), back(-1, 0)],
  };
}

/** The points of a walk with H^-1, or with the inverse of |H|, in steps that are not longer than the reach. */
export function paths(state, steps = STEPS) {
  const p = saddle(state),
    walk = sign => {
      const points = [state.start];
      for (let t = 0; t < steps; t++) {
        const [x, y] = points[t],
          d = p.move(x, y, sign),
          k = Math.min(1, REACH / (Math.hypot(...d) || 1));
        points.push([x + k * d[0], y + k * d[1]]);
      }
      return points;
    };
  return { newton: walk(false), psgd: walk(true) };
}

/** The largest difference from the library's walks. */
export const check = ({ cases }) =>
  Math.max(
    ...cases.map(({ state, newton, psgd }) => {
      const mine = paths(state, newton.length - 1);
      return Math.max(difference(mine.newton, newton), difference(mine.psgd, psgd));
    }),
  );

export function render({ model, el }) {
  const $ = mount(
    el,
    `<div class="lv-stage lv-large"><canvas class="lv-map" role="img"></canvas></div>
<div class="lv-sliders"></div><p class="lv-say" aria-live="polite"></p><p class="lv-agrees"></p>`,
  );
  const get = key => model.get(key),
    sliders = $(".lv-sliders"),
    state = () => ({ condition: get("condition"), angle: get("angle"), start: get("start") });
  let ink = inks(el),
    p = null,
    found = null,
    ground = null;
  const parts = [
    slider(sliders, model, {
      name: "condition",
      key: "condition",
      to: s => 10 ** (0.02 * s),
      from: v => Math.log10(v) / 0.02,
      show: v => v.toPrecision(v < 100 ? 2 : 3),
    }),
    slider(sliders, model, {
      name: "angle",
      key: "angle",
      to: s => (s * Math.PI) / 200,
      from: v => (v * 200) / Math.PI,
      show: v => `${Math.round((v * 180) / Math.PI)}°`,
    }),
    grip($(".lv-stage"), { name: "Where both begin", box: () => BOX, get: () => get("start"), set: start => put(model, { start }) }),
  ];
  function compute() {
    ink = inks(el);
    p = saddle(state());
    found = paths(state());
    ground = terrain(p.f, BOX, 0, ink);
  }
  function draw() {
    for (const part of parts) part.sync();
    const [c, w, h] = sheet($(".lv-map")),
      [to, from] = scales(BOX, w, h),
      start = to(get("start")),
      cell = 4;
    c.drawImage(ground, 0, 0, w, h);
    c.fillStyle = `${ink("newton")}38`;
    for (let X = 0; X < w; X += cell) for (let Y = 0; Y < h; Y += cell) if (p.climbs(...from(X + cell / 2, Y + cell / 2))) c.fillRect(X, Y, cell, cell);
    crosses(c, p.minima.map(to), ink("ink"));
    const down = p.down(...get("start")),
      size = 0.5 / (Math.hypot(...down) || 1);
    arrow(c, start, to([0, 1].map(i => get("start")[i] + size * down[i])), ink("sgd"));
    for (const name of ["newton", "psgd"]) {
      stroke(c, found[name].map(to), { colour: ink(name), width: 2.4, dash: name === "newton" ? [5, 4] : [] });
      arrow(c, start, to(found[name][1]), ink(name));
    }
    const ends = { newton: "Newton", psgd: "|H|⁻¹" };
    for (const name in ends) {
      const [X, Y] = to(found[name][STEPS]);
      note(c, ends[name], X + 9, Y + (name === "psgd" ? -9 : 18), ink);
    }
    note(c, "drag me", start[0], start[1] - 18, ink, "center");
    const loss = name => p.f(...found[name][STEPS]).toFixed(3),
      [x, y] = get("start");
    const text = `${p.climbs(x, y) ? "Here Newton's step points uphill." : "Here Newton's step points downhill."} From the loss ${p.f(x, y).toFixed(3)}, Newton's method ends at ${loss("newton")} and the inverse of |H| at ${loss("psgd")}.`;
    tell($(".lv-say"), text);
    $(".lv-map").setAttribute("aria-label", `A saddle between two minima; the strip where Newton's step points uphill is red. ${text}`);
  }
  agree($(".lv-agrees"), check(get("check")));
  return watch(el, model, ["condition", "angle", "start"], { compute, draw });
}
export default { render };
