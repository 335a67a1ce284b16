/**
 * Shows what Carnator Report found in the node itself: the decision, the steps, the full text.
 * The host draws the map below on its own; text it draws only for nodes of its own.
 */
import { app } from "../../scripts/app.js";

const NODE = "CarnatorReport";
const WIDGET = "carnator_report";
const WAITING = "Run the graph: what was reused, and why, is shown here.";
const MAP = "Map: bright followed the earlier generation, dark was computed anew.";
const TITLES = {
  hit: ["Hit", "#6fcf7f"],
  exact: ["Exact hit", "#6fcf7f"],
  miss: ["Miss: run in full", "#e5b454"],
  dense: ["Run in full", "#a9adb5"],
};
const STEPS = {
  evaluated: ["#e5b454", "the model was evaluated"],
  predicted: ["#3f6f48", "predicted from the earlier generation"],
  served: ["#6fcf7f", "taken from the record"],
};

function element(tag, style, text) {
  const made = document.createElement(tag);
  Object.assign(made.style, style);
  if (text !== undefined) made.textContent = text;
  return made;
}

function headline(report) {
  const [title, color] = TITLES[report.decision] ?? [report.decision, "#a9adb5"];
  const line = element("div", { display: "flex", gap: "8px", alignItems: "baseline" });
  line.append(element("b", { color, fontSize: "16px", whiteSpace: "nowrap" }, title));
  const count = `${report.evaluations} of ${report.dense_evaluations} model evaluations`;
  line.append(element("span", { fontSize: "12px" }, count));
  return line;
}

/** One block per step of the schedule. */
function strip(steps) {
  const row = element("div", { display: "flex", gap: "1px", height: "10px", flex: "none" });
  for (const { index, kind } of steps) {
    const [background, meaning] = STEPS[kind] ?? ["#a9adb5", kind];
    const block = element("div", { flex: "1", background, borderRadius: "2px" });
    block.title = `Step ${index + 1}: ${meaning}`;
    row.append(block);
  }
  return row;
}

function show(node, output) {
  const box = node.widgets?.find((widget) => widget.name === WIDGET)?.element;
  if (!box || !output?.text) return;
  const report = output.carnator?.[0];
  const style = { whiteSpace: "pre-wrap", userSelect: "text", lineHeight: "1.35" };
  const text = element("div", style, [output.text].flat().join("\n"));
  if (report && output.images?.length) text.textContent += `\n${MAP}`;
  box.replaceChildren(...(report ? [headline(report), strip(report.steps)] : []), text);
}

app.registerExtension({
  name: "Carnator.Report",
  nodeCreated(node) {
    if (node.comfyClass !== NODE) return;
    const box = element("div", {
      display: "flex",
      flexDirection: "column",
      gap: "6px",
      boxSizing: "border-box",
      padding: "8px",
      overflow: "auto",
      background: "var(--comfy-input-bg, #222)",
      color: "var(--input-text, #ddd)",
      borderRadius: "6px",
      fontSize: "11px",
    });
    box.append(element("div", { opacity: "0.7" }, WAITING));
    // A wheel turn scrolls a text that is longer than its box; else it zooms the canvas.
    box.addEventListener("wheel", (event) => {
      if (box.scrollHeight > box.clientHeight) event.stopPropagation();
    });
    const widget = node.addDOMWidget(WIDGET, "carnator", box, {
      serialize: false,
      hideOnZoom: false,
      getMinHeight: () => 180,
      getMaxHeight: () => 240, // the rest of the node is for the map
      getValue: () => "",
      setValue: () => {},
    });
    widget.serialize = false;
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
});
