// Two dampings, and none: what each makes of every curvature, and where one of them has a pole.
import { agree, chart, difference, inks, legend, mount, slider, tell, watch } from "./kit.js";

const KINDS = {
  // of damping: the colour, the dashes and the words of each
  nonconvex: { colour: "psgd", dash: [], words: "nonconvex, h + λu" },
  traditional: { colour: "third", dash: [6, 4], words: "traditional, h + λv" },
  none: { colour: "soft", dash: [2, 3], words: "none" },
};

/** The best P for products of a curvature c with noise: damped by the probe, (c + l) v, by other noise, c v + l u, or not. */
export const gain = (kind, c, l, noise) =>
  1 / (kind === "traditional" ? Math.hypot(c + l, noise) : kind === "nonconvex" ? Math.hypot(c, l, noise) : Math.hypot(c, noise));

/** The largest difference from the library's numbers. */
export const check = ({ cases }) =>
  Math.max(
    ...cases.map(({ kind, damping, noise, curvatures, gains }) =>
      difference(
        curvatures.map(c => gain(kind, c, damping, noise)),
        gains,
      ),
    ),
  );

export function render({ model, el }) {
  const $ = mount(
    el,
    `<div class="lv-pair"><div class="lv-wide"><canvas class="lv-gain" role="img"></canvas></div>
<div class="lv-wide"><canvas class="lv-eig" role="img"></canvas></div></div>
<div class="lv-bar lv-legend"></div>
<div class="lv-sliders"></div><p class="lv-say" aria-live="polite"></p><p class="lv-agrees"></p>`,
  );
  const get = key => model.get(key),
    curve = s => Math.sign(s - 50) * ((s - 50) / 50) ** 2;
  let ink = inks(el);
  legend($(".lv-legend"), KINDS);
  const parts = [
    slider($(".lv-sliders"), model, {
      name: "damping λ",
      key: "damping",
      to: s => 0.01 + (s / 100) ** 2,
      from: v => 100 * Math.sqrt(Math.max(0, v - 0.01)),
      show: v => v.toFixed(2),
    }),
    slider($(".lv-sliders"), model, { name: "noise in Hv", key: "noise", to: s => (s / 150) ** 2, from: v => 150 * Math.sqrt(v), show: v => v.toFixed(2) }),
    slider($(".lv-sliders"), model, {
      name: "curvature",
      key: "curvature",
      to: curve,
      from: v => 50 + 50 * Math.sign(v) * Math.sqrt(Math.abs(v)),
      show: v => v.toFixed(2),
    }),
  ];
  function draw() {
    for (const part of parts) part.sync();
    const l = get("damping"),
      noise = get("noise"),
      own = get("curvature"),
      x = [-1.2, 1.2],
      ticks = [-1, 0, 1.2],
      label = "curvature";
    const c = Array.from({ length: 481 }, (_, i) => (i - 240) / 200),
      near = c.concat(-l - 1e-9, -l + 1e-9, -1e-9, 1e-9).sort((a, b) => a - b);
    const lines = value =>
      Object.entries(KINDS).flatMap(([kind, { colour, dash }]) => {
        const style = { colour: ink(colour), width: 2.4, dash };
        return [
          { ...style, points: near.map(v => [v, value(kind, v)]) },
          { ...style, dots: 5, points: [[own, value(kind, own)]] },
        ];
      });
    chart($(".lv-gain"), ink, { title: "P", x, y: [-1, 3], ticks, label, lines: lines((kind, v) => Math.log10(Math.min(gain(kind, v, l, noise), 1e15))) });
    const names = [
      [-4, "−4"],
      [-1, "−1"],
      [0, "0"],
      [1, "1"],
      [4, "4"],
    ];
    chart($(".lv-eig"), ink, { title: "PH", x, y: [-5, 5], ticks, label, names, lines: lines((kind, v) => Math.max(-99, v * gain(kind, v, l, noise))) });
    const at = kind => `${gain(kind, own, l, noise).toPrecision(2)} (PH ${(own * gain(kind, own, l, noise)).toPrecision(2)})`;
    const text = `At the curvature ${own.toFixed(2)} nonconvex damping gives P = ${at("nonconvex")}, traditional P = ${at("traditional")}, largest at ${(-l).toFixed(2)}, and none P = ${at("none")}.`;
    tell($(".lv-say"), text);
    $(".lv-gain").setAttribute("aria-label", `P against curvature for both dampings and none. ${text}`);
    $(".lv-eig").setAttribute("aria-label", `P times the curvature against curvature for both dampings and none. ${text}`);
  }
  agree($(".lv-agrees"), check(get("check")));
  return watch(el, model, ["damping", "noise", "curvature"], {
    compute: () => {
      ink = inks(el);
    },
    draw,
  });
}
export default { render };
