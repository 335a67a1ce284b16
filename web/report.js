/**
 * Shows what Carnator Report found in the node itself: the decision, the steps, the full text.
 * The host draws the map below on its own; text it draws only for nodes of its own.
 */
import { app } from "../../scripts/app.js";
import { element, marksOf, strip } from "./pictures.js";
import { number, t } from "./words.js";

const NODE = "CarnatorReport";
const WIDGET = "carnator_report";
const TITLES = { hit: "titleHit", exact: "titleExact", miss: "titleMiss", dense: "titleDense" };

function headline(report) {
  const line = element("div", "carnator-headline");
  const title = TITLES[report.decision] ? t(TITLES[report.decision]) : report.decision;
  line.append(element("b", `carnator-badge ${report.decision}`, title));
  const counts = { n: number(report.evaluations), of: number(report.dense_evaluations) };
  line.append(element("span", "", t("evaluationsOf", counts)));
  return line;
}

function show(node, output) {
  const box = node.widgets?.find((widget) => widget.name === WIDGET)?.element;
  if (!box || !output?.text) return;
  const report = output.carnator?.[0];
  const text = element("div", "carnator-text", [output.text].flat().join("\n"));
  if (report && output.images?.length) text.textContent += `\n${t("mapNote")}`;
  const picture = report ? [headline(report), strip(marksOf(report.steps))] : [];
  box.replaceChildren(...picture, text);
}

/** A box of our own in a node, which both renderers of the host show. */
export function addBox(node, name, least, most) {
  const box = element("div", "carnator-box");
  // A wheel turn scrolls a text that is longer than its box; else it zooms the canvas.
  box.addEventListener("wheel", (event) => {
    if (box.scrollHeight > box.clientHeight) event.stopPropagation();
  });
  const widget = node.addDOMWidget(name, "carnator", box, {
    serialize: false,
    hideOnZoom: false,
    getMinHeight: least,
    getMaxHeight: most,
    getValue: () => "",
    setValue: () => {},
  });
  widget.serialize = false;
  return box;
}

export const reportHooks = {
  nodeCreated(node) {
    if (node.comfyClass !== NODE) return;
    const box = addBox(node, WIDGET, () => 180, () => 240); // the rest is for the map
    box.append(element("div", "carnator-faint", t("reportWaiting")));
    const onExecuted = node.onExecuted;
    node.onExecuted = function (output) {
      onExecuted?.apply(this, arguments);
      show(this, output);
    };
  },
  /** Outputs come back without a run when a tab is opened again or a run is picked in history. */
  onNodeOutputsUpdated(outputs) {
    for (const [id, output] of Object.entries(outputs)) {
      const node = app.graph?.getNodeById(id);
      if (node?.comfyClass === NODE) show(node, output);
    }
  },
};
