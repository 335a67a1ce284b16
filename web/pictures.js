/** Small pictures of a run: its steps as a strip, its reuse scope as a map. */
import { t } from "./words.js";

const KINDS = { "#": "evaluated", ".": "predicted", "=": "served" };

/** An element of a class, with text and attributes. */
export function element(tag, name, text, attributes = {}) {
  const made = document.createElement(tag);
  if (name) made.className = name;
  if (text !== undefined) made.textContent = text;
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}

/** One block per step of the schedule; ``planned`` steps have room, those to come are empty. */
export function strip(marks, planned = 0) {
  const row = element("div", "carnator-strip", undefined, { role: "img" });
  const count = (mark) => [...marks].filter((one) => one === mark).length;
  row.ariaLabel = t("stripLabel", { evaluated: count("#"), predicted: marks.length - count("#") });
  const blocks = [...marks.padEnd(planned, " ")].map((mark, index) => {
    const kind = KINDS[mark];
    const block = element("div", `carnator-step ${kind ?? "coming"}`);
    if (kind) block.title = t("step", { n: index + 1, kind: t(kind) });
    return block;
  });
  row.append(...blocks);
  return row;
}

/** The steps of a report as the marks above. */
export function marksOf(steps) {
  const marks = Object.fromEntries(Object.entries(KINDS).map(([mark, kind]) => [kind, mark]));
  return steps.map(({ kind }) => marks[kind] ?? "?").join("");
}

/** A reuse scope [F][h][w] in 0..1 as one canvas per frame: bright followed the donor. */
export function scopeMap(scope) {
  const row = element("div", "carnator-map", undefined, { role: "img" });
  row.ariaLabel = t("mapLabel");
  row.title = t("mapLabel");
  for (const frame of scope.slice(0, 8)) {
    const canvas = element("canvas");
    [canvas.width, canvas.height] = [frame[0].length, frame.length];
    const context = canvas.getContext("2d");
    const image = context.createImageData(canvas.width, canvas.height);
    frame.flat().forEach((value, i) => {
      const mixed = [0.05, 0.05, 0.15].map((cold, c) => cold + value * ([1, 0.85, 0.2][c] - cold));
      image.data.set([...mixed.map((part) => 255 * part), 255], 4 * i);
    });
    context.putImageData(image, 0, 0);
    row.append(canvas);
  }
  return row;
}
