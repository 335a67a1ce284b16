/** The sidebar tab: earlier generations, what they saved, and what a person can do with them. */
import { api } from "../../scripts/api.js";
import { app } from "../../scripts/app.js";
import { Card } from "./card.js";
import { ask, order, workflow } from "./client.js";
import { element } from "./pictures.js";
import { bytes, duration, number, t } from "./words.js";

const ID = "carnator";
const PAGE = 50; // cards asked for at a time
const LOOK = 2000; // milliseconds between two looks at the change counter
const AFTER_RUN = [300, 1500]; // a record is written just after its run
const DEMO = "carnator_demo";

class Panel {
  constructor(root) {
    this.root = root;
    this.cards = new Map();
    this.count = PAGE;
    this.store = "";
    this.seen = -1;
    this.asked = 0;
    root.classList.add("carnator-panel");
    this.build();
    this.refresh();
    this.loadStores();
    this.timer = setInterval(() => this.look(), LOOK);
    this.onRun = ({ detail }) => {
      if (detail.state !== "done") return;
      this.loadStores();
      for (const pause of AFTER_RUN) setTimeout(() => this.look(), pause);
    };
    api.addEventListener("carnator.run", this.onRun);
  }

  close() {
    clearInterval(this.timer);
    api.removeEventListener("carnator.run", this.onRun);
  }

  build() {
    const head = element("header", "carnator-head");
    this.totals = element("dl", "carnator-totals");
    this.meter = element("div", "carnator-meter", undefined, { role: "meter", "aria-valuemin": 0 });
    this.meter.append(element("div"));
    this.stores = element("select", "carnator-input", undefined, { "aria-label": t("storeLabel") });
    this.stores.hidden = true;
    this.stores.addEventListener("change", () => this.choose(this.stores.value));
    this.search = element("input", "carnator-input", undefined, {
      type: "search",
      placeholder: t("search"),
      "aria-label": t("search"),
      maxlength: 200,
    });
    this.search.addEventListener("input", () => {
      clearTimeout(this.typing);
      this.typing = setTimeout(() => this.refresh(), 200);
    });
    head.append(element("h2", "", "Carnator"), this.totals, this.meter, this.stores, this.search);
    this.trouble = element("div", "carnator-trouble", undefined, { role: "alert" });
    this.trouble.hidden = true;
    this.list = element("ul", "carnator-list", undefined, { "aria-label": t("listLabel") });
    this.none = element("div", "carnator-none");
    this.more = element("button", "carnator-button", t("more"), { type: "button" });
    this.more.addEventListener("click", () => {
      this.count += PAGE;
      this.refresh();
    });
    this.clear = element("button", "carnator-button danger", t("clear"), { type: "button" });
    this.clear.addEventListener("click", () => this.clearAll());
    this.foot = element("footer", "carnator-foot");
    this.foot.append(this.clear);
    const scroll = element("div", "carnator-scroll");
    scroll.append(this.trouble, this.none, this.list, this.more);
    this.root.replaceChildren(head, scroll, this.foot);
    for (const part of [this.none, this.more, this.foot]) part.hidden = true;
  }

  /** Ask for the list if anything changed, by whatever process. */
  async look() {
    if (!this.root.isConnected || document.hidden || this.looking) return;
    this.looking = true;
    try {
      const { changes } = await ask("changes", { store: this.store });
      if (changes !== this.seen || !this.trouble.hidden) await this.refresh();
    } catch (error) {
      this.complain(error);
    } finally {
      this.looking = false;
    }
  }

  async refresh() {
    const number_ = ++this.asked;
    const query = { search: this.search.value.trim(), store: this.store };
    try {
      const shown = { cards: [], more: true };
      while (shown.cards.length < this.count && shown.more) {
        const part = await ask("records", { ...query, start: shown.cards.length, count: PAGE });
        Object.assign(shown, part, { cards: [...shown.cards, ...part.cards] });
      }
      if (number_ !== this.asked) return; // a later question is under way
      this.trouble.hidden = true;
      this.seen = shown.changes;
      this.show(shown);
    } catch (error) {
      if (number_ === this.asked) this.complain(error);
    }
  }

  complain(error) {
    this.trouble.hidden = false;
    this.trouble.textContent = t("trouble", { error: error.message });
  }

  show(found) {
    const fact = (name, value) => [element("dt", "", name), element("dd", "", value)];
    this.totals.replaceChildren(
      ...fact(t("records"), number(found.records)),
      ...fact(t("hits"), number(found.hits)),
      ...fact(t("timeSaved"), duration(found.seconds_saved)),
    );
    const share = Math.min(1, found.bytes / found.size_limit);
    const space = t("space", { used: bytes(found.bytes), limit: bytes(found.size_limit) });
    this.meter.firstChild.style.width = `${Math.max(share ? 1 : 0, 100 * share)}%`;
    this.meter.title = space;
    this.meter.dataset.text = space;
    this.meter.setAttribute("aria-label", space);
    this.meter.setAttribute("aria-valuemax", found.size_limit);
    this.meter.setAttribute("aria-valuenow", found.bytes);
    this.held = found.records;
    this.foot.hidden = !found.records;
    this.more.hidden = !found.more;
    this.showNone(found);
    this.showCards(found.cards);
  }

  showCards(cards) {
    const kept = new Map();
    for (const card of cards) {
      const shown = this.cards.get(card.id) ?? new Card(card, this.store, this);
      shown.update(card);
      kept.set(card.id, shown);
    }
    for (const [id, shown] of this.cards) if (!kept.has(id)) shown.element.remove();
    [...kept.values()].forEach(({ element: item }, place) => {
      if (this.list.children[place] !== item) {
        this.list.insertBefore(item, this.list.children[place] ?? null);
      }
    });
    this.cards = kept;
  }

  showNone(found) {
    this.none.hidden = found.cards.length > 0;
    if (!this.none.hidden && found.records) {
      this.none.replaceChildren(element("p", "", t("nothingFound")));
    } else if (!this.none.hidden && !this.none.querySelector("ol")) {
      const steps = element("ol");
      for (const n of [1, 2, 3]) steps.append(element("li", "", t(`empty${n}`)));
      const demo = element("button", "carnator-button", t("openDemo"), { type: "button" });
      demo.addEventListener("click", () => this.openDemo());
      const icon = element("i", "pi pi-history", undefined, { "aria-hidden": "true" });
      this.none.replaceChildren(icon, element("p", "", t("empty")), steps, demo);
    }
  }

  async openDemo() {
    try {
      await app.loadGraphData(await workflow(DEMO), true, true, DEMO);
    } catch (error) {
      this.complain(error);
    }
  }

  async loadStores() {
    const { stores } = await ask("stores").catch(() => ({ stores: [] }));
    this.stores.hidden = stores.length < 2;
    const options = stores.map(({ store, name }) => {
      return element("option", "", name || t("ownStore"), { value: name ? store : "" });
    });
    this.stores.replaceChildren(...options);
    this.stores.value = this.store;
  }

  choose(store) {
    this.store = store;
    this.count = PAGE;
    this.showCards([]);
    this.refresh();
  }

  async act(path, body) {
    try {
      await order(path, { ...body, store: this.store || undefined });
    } catch (error) {
      const summary = t("failed");
      app.extensionManager.toast.add({ severity: "error", summary, detail: error.message });
    }
    await this.refresh();
  }

  async confirmed(title, message) {
    const asked = app.extensionManager.dialog?.confirm;
    if (!asked) return window.confirm(message);
    return (await asked({ title, message, type: "delete" })) === true;
  }

  // What the buttons of a card do.

  pin(card, pinned) {
    return this.act("pin", { ids: [card.id], pinned });
  }

  async remove(card) {
    const label = card.label || t("unnamed", { seed: card.seed });
    if (!(await this.confirmed(t("deleteTitle"), t("deleteMessage", { label })))) return;
    const place = [...this.cards.keys()].indexOf(card.id);
    await this.act("delete", { ids: [card.id] });
    const next = [...this.cards.values()][Math.min(place, this.cards.size - 1)];
    (next?.remove ?? this.search).focus(); // the keyboard goes on where it was
  }

  async clearAll() {
    const n = this.held;
    const message = t("clearMessage", { n: number(n) });
    if (await this.confirmed(t("clearTitle"), message)) await this.act("clear", { confirm: n });
  }
}

let panel;

export function registerSidebar() {
  app.extensionManager.registerSidebarTab({
    id: ID,
    icon: "pi pi-history",
    title: "Carnator",
    tooltip: t("tabTooltip"),
    type: "custom",
    render(container) {
      panel?.close();
      const root = element("div");
      container.style.height = "100%";
      container.replaceChildren(root);
      panel = new Panel(root);
    },
    destroy() {
      panel?.close();
      panel = undefined;
    },
  });
}
