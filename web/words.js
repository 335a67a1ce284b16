/** The pack's texts in the editor's language, from locales/ as the host serves them. */
import { api } from "../../scripts/api.js";
import { app } from "../../scripts/app.js";

let texts = {};
const FALLBACK = "en";

export async function loadWords() {
  try {
    const all = await (await api.fetchApi("/i18n")).json();
    const chosen = app.extensionManager.setting.get("Comfy.Locale") ?? FALLBACK;
    texts = { ...all[FALLBACK]?.carnator, ...all[chosen]?.carnator };
  } catch (error) {
    console.warn("[Carnator] no texts:", error);
  }
}

/** The text of a key, with {names} filled in. */
export function t(key, values = {}) {
  const text = texts[key] ?? key;
  return text.replace(/\{(\w+)\}/g, (whole, name) => String(values[name] ?? whole));
}

function language() {
  return app.extensionManager.setting.get("Comfy.Locale") || undefined;
}

export function number(value, digits = 0) {
  return value.toLocaleString(language(), { maximumFractionDigits: digits });
}

export function bytes(count) {
  const units = ["B", "KB", "MB", "GB", "TB"];
  let size = count;
  let unit = 0;
  while (size >= 1000 && unit < units.length - 1) {
    size /= 1024;
    unit += 1;
  }
  return `${number(size, size < 10 && unit > 1 ? 1 : 0)} ${units[unit]}`;
}

export function duration(seconds) {
  if (seconds < 9.95) return t("seconds", { n: number(seconds, 1) });
  if (seconds < 99.5) return t("seconds", { n: number(seconds) });
  if (seconds < 5970) return t("minutes", { n: number(seconds / 60, seconds < 600 ? 1 : 0) });
  return t("hours", { n: number(seconds / 3600, 1) });
}

export function day(seconds) {
  const options = { month: "short", day: "numeric", hour: "2-digit", minute: "2-digit" };
  return new Date(seconds * 1000).toLocaleString(language(), options);
}
