/** What the editor loads of Carnator: reports and live lines on nodes, the sidebar, the settings. */
import { api } from "../../scripts/api.js";
import { app } from "../../scripts/app.js";
import { introduce } from "./client.js";
import { liveHooks } from "./live.js";
import { reportHooks } from "./report.js";
import { settings, settingsHooks } from "./settings.js";
import { registerSidebar } from "./sidebar.js";
import { loadWords } from "./words.js";

function loadStyles() {
  for (const name of ["nodes", "sidebar"]) {
    const link = document.createElement("link");
    link.rel = "stylesheet";
    link.href = new URL(`./${name}.css`, import.meta.url).href;
    document.head.append(link);
  }
}

app.registerExtension({
  name: "Carnator",
  settings,
  async init() {
    loadStyles();
    await loadWords(); // before the first node is made
  },
  setup() {
    liveHooks.setup();
    registerSidebar();
    introduce();
    for (const event of ["status", "reconnected"]) api.addEventListener(event, introduceOnce);
  },
  nodeCreated(node) {
    reportHooks.nodeCreated(node);
    liveHooks.nodeCreated(node);
    settingsHooks.nodeCreated(node);
  },
  onNodeOutputsUpdated: reportHooks.onNodeOutputsUpdated,
});

let introduced;

/** The host gives the page its id with the first message, and may give it another later. */
function introduceOnce(event) {
  if (event.type === "status" && introduced === api.clientId) return;
  introduced = api.clientId;
  introduce();
}
