/** The pack's page in the editor's settings: each has an effect, and says which. */
import { app } from "../../scripts/app.js";

const DEFAULTS = {
  preset: "Carnator.Defaults.Preset",
  noise_policy: "Carnator.Defaults.NoisePolicy",
};
const NODES = ["CarnatorAccelerate", "CarnatorSignatureMatch"];

/** English texts; those of other languages are in locales/. The server reads the store's two. */
export const settings = [
  {
    id: DEFAULTS.noise_policy,
    category: ["Carnator", "New nodes", "Noise policy"],
    name: "Noise policy of new nodes",
    tooltip:
      "keep: the noise of your seed. bank: the seed picks one of 16 shared noises, so that runs " +
      "with different seeds can build on each other.",
    type: "combo",
    options: ["keep", "bank"],
    defaultValue: "keep",
  },
  {
    id: DEFAULTS.preset,
    category: ["Carnator", "New nodes", "Preset"],
    name: "Preset of new nodes",
    tooltip:
      "How near the result has to stay to the one without reuse. Nodes that are there already " +
      "keep theirs.",
    type: "combo",
    options: ["faithful", "balanced", "fast"],
    defaultValue: "balanced",
  },
  {
    id: "Carnator.Store.Size",
    category: ["Carnator", "Store", "Size"],
    name: "Size limit of the store (GiB)",
    tooltip: "When it is full, what saves least per byte goes first. Pinned generations stay.",
    type: "number",
    attrs: { min: 0.01, max: 4096, step: 1, maxFractionDigits: 2 },
    defaultValue: 8,
  },
  {
    id: "Carnator.Store.Folder",
    category: ["Carnator", "Store", "Folder"],
    name: "Folder of the store",
    tooltip:
      "A folder on the server's machine; empty is a place of its own in ComfyUI's user folder. " +
      "A Carnator Store node has its own setting. No effect on a server with several users.",
    type: "text",
    defaultValue: "",
  },
];

export const settingsHooks = {
  /** A node made anew starts with what is set; a loaded one gets its own values after this. */
  nodeCreated(node) {
    if (!NODES.includes(node.comfyClass)) return;
    for (const [name, id] of Object.entries(DEFAULTS)) {
      const widget = node.widgets?.find((one) => one.name === name);
      const value = app.extensionManager.setting.get(id);
      if (widget && widget.options?.values?.includes(value)) widget.value = value;
    }
  },
};
