/** The line on a node that says what its run is doing, while it does it. */
import { api } from "../../scripts/api.js";
import { app } from "../../scripts/app.js";
import { ask } from "./client.js";
import { element, scopeMap, strip } from "./pictures.js";
import { addBox } from "./report.js";
import { duration, number, t } from "./words.js";

const NODES = ["CarnatorAccelerate", "CarnatorSparseAttentionSampler"];
const WIDGET = "carnator_live";
const HEIGHT = 88; // the host keeps 10 of it free above and below
const MAP_HEIGHT = 90;
const room = new WeakMap(); // node: the height added for its map, and its height before

/** The node of an execution id such as "12:7:5": the way leads through subgraphs. */
function nodeOf(id) {
  let graph = app.rootGraph ?? app.graph;
  const path = String(id).split(":");
  const last = path.pop();
  for (const step of path) graph = graph?.getNodeById(Number(step))?.subgraph;
  return graph?.getNodeById(Number(last)) ?? graph?.getNodeById(last);
}

/** What stands in the line: a badge's kind and text, what goes on, and why. */
export function said(run) {
  const kinds = { hit: "hit", exact: "exact", miss: "miss", dense: "dense", candidate: "probe" };
  const kind = run.state === "probe" ? "probe" : (kinds[run.decision] ?? "dense");
  const badge = t(`badge_${kind}`);
  if (run.state === "probe") return { kind, badge, now: t("probing"), why: "" };
  if (run.state === "aside") return { kind, badge, now: t("aside"), why: run.reason };
  const saved = run.seconds_saved > 0.05 ? duration(run.seconds_saved) : "";
  const why = run.donor_label ? t("from", { label: run.donor_label }) : run.reason;
  if (run.state === "done") {
    const counts = { n: number(run.evaluations), of: number(run.dense_evaluations) };
    const now = t("evaluationsOf", counts) + (saved ? ` · ${t("saved", { time: saved })}` : "");
    return { kind, badge, now, why };
  }
  const mark = { "#": "evaluated", ".": "predicted", "=": "served" }[run.steps.at(-1)];
  const step = t("stepOf", { n: run.steps.length, of: run.planned, kind: mark ? t(mark) : "" });
  return { kind, badge, now: step + (saved ? ` · ${t("savedSoFar", { time: saved })}` : ""), why };
}

function draw(node, run) {
  const box = node.widgets?.find((widget) => widget.name === WIDGET)?.element;
  if (!box) return;
  const { kind, badge, now, why } = said(run);
  const line = element("div", "carnator-headline");
  line.append(element("b", `carnator-badge ${kind}`, badge), element("span", "carnator-now", now));
  const reason = element("div", "carnator-why", why);
  reason.title = [why, run.record && t("record", { text: run.record })].filter(Boolean).join("\n");
  const parts = [line, strip(run.steps ?? "", run.planned ?? 0), reason];
  if (run.state === "done" && run.map) line.append(mapButton(node, box, run));
  box.dataset.state = run.state;
  box.replaceChildren(...parts);
  resize(node, 0);
}

/** The scope map, fetched when it is asked for. */
function mapButton(node, box, run) {
  const button = element("button", "carnator-small", t("map"), {
    type: "button",
    "aria-expanded": "false",
  });
  button.addEventListener("click", async () => {
    const open = box.querySelector(".carnator-map");
    button.setAttribute("aria-expanded", String(!open));
    if (open) {
      open.remove();
      return resize(node, 0);
    }
    const shown = await ask(`runs/${run.run}`)
      .then(({ scope }) => scopeMap(scope))
      .catch(() => element("div", "carnator-map carnator-faint", t("mapGone")));
    box.append(shown);
    resize(node, MAP_HEIGHT);
  });
  return button;
}

/** Room for what is shown besides the line; a node that grew for it shrinks again after. */
function resize(node, extra) {
  const before = room.get(node) ?? { extra: 0, height: 0 };
  if (before.extra === extra) return;
  room.set(node, { extra, height: node.size[1] });
  const [width, least] = node.computeSize();
  const height = extra ? node.size[1] : before.height;
  node.setSize([Math.max(node.size[0], width), Math.max(height, least)]);
  app.graph?.setDirtyCanvas(true, true);
}

export const liveHooks = {
  nodeCreated(node) {
    if (!NODES.includes(node.comfyClass)) return;
    const height = () => HEIGHT + (room.get(node)?.extra ?? 0);
    const box = addBox(node, WIDGET, height, height);
    box.setAttribute("role", "status");
    box.append(element("div", "carnator-faint", t("liveWaiting")));
  },
  setup() {
    api.addEventListener("carnator.run", ({ detail }) => {
      for (const id of detail.nodes) {
        const node = nodeOf(id);
        if (node) draw(node, detail);
      }
    });
  },
};
