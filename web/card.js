/** One earlier generation in the sidebar. */
import { preview } from "./client.js";
import { element } from "./pictures.js";
import { bytes, day, duration, number, t } from "./words.js";

/** A button that shows an icon and says in words what it does. */
export function iconButton(icon, label, pressed) {
  const button = element("button", "carnator-icon", undefined, { type: "button" });
  button.append(element("i", `pi ${icon}`, undefined, { "aria-hidden": "true" }));
  button.ariaLabel = label;
  button.title = label;
  if (pressed !== undefined) button.setAttribute("aria-pressed", String(pressed));
  return button;
}

/** Still for whoever asked their system for less motion. */
function still(image, address) {
  image.addEventListener(
    "load",
    () => {
      const canvas = element("canvas");
      [canvas.width, canvas.height] = [image.naturalWidth, image.naturalHeight];
      canvas.getContext("2d").drawImage(image, 0, 0);
      image.src = canvas.toDataURL();
      URL.revokeObjectURL(address);
    },
    { once: true },
  );
}

async function loadPicture(image, id, store) {
  const address = await preview(id, store).catch(() => null);
  if (address === null) return image.classList.add("none");
  const reduced = matchMedia("(prefers-reduced-motion: reduce)").matches;
  if (reduced) still(image, address);
  else image.addEventListener("load", () => URL.revokeObjectURL(address), { once: true });
  image.src = address;
}

export class Card {
  /** ``actions``: pin(card, pinned) and remove(card). */
  constructor(card, store, actions) {
    this.id = card.id;
    this.element = element("li", "carnator-card");
    this.image = element("img", "carnator-preview", undefined, { alt: "", draggable: "false" });
    loadPicture(this.image, card.id, store);
    this.title = element("div", "carnator-label");
    this.facts = element("div", "carnator-faint");
    this.use = element("div", "carnator-use");
    const body = element("div", "carnator-body");
    body.append(this.title, this.use, this.facts);
    const buttons = element("div", "carnator-buttons");
    this.pin = iconButton("pi-thumbtack", "", false);
    this.remove = iconButton("pi-trash", "");
    this.pin.addEventListener("click", () => actions.pin(this.card, !this.card.pinned));
    this.remove.addEventListener("click", () => actions.remove(this.card));
    buttons.append(this.pin, this.remove);
    this.element.append(this.image, body, buttons);
    this.update(card);
  }

  /** Only what changed is written, so that focus and pictures stay. */
  update(card) {
    this.card = card;
    const label = card.label || t("unnamed", { seed: card.seed });
    this.title.textContent = label;
    this.title.title = label;
    const used = { n: number(card.hits), time: duration(card.seconds_saved) };
    this.use.textContent = card.hits ? t(card.hits === 1 ? "usedOnce" : "used", used) : t("unused");
    this.use.classList.toggle("idle", !card.hits);
    const facts = [
      card.model.replace(/\.safetensors$/, ""),
      card.steps && t("steps", { n: card.steps }),
      card.cfg && `CFG ${number(card.cfg, 2)}`,
      bytes(card.nbytes),
      day(card.created),
    ];
    this.facts.textContent = facts.filter(Boolean).join(" · ");
    this.facts.title = [card.sampler, card.shape.join(" × "), card.seed && `seed ${card.seed}`]
      .filter(Boolean)
      .join(" · ");
    this.element.classList.toggle("pinned", card.pinned);
    const pin = t(card.pinned ? "unpin" : "pin", { label });
    [this.pin.ariaLabel, this.pin.title] = [pin, t(card.pinned ? "pinnedHint" : "pinHint")];
    this.pin.setAttribute("aria-pressed", String(card.pinned));
    [this.remove.ariaLabel, this.remove.title] = [t("delete", { label }), t("deleteHint")];
  }
}
