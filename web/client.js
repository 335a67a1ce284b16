/** The pack's own routes, asked through the host, which knows the user and the server's address. */
import { api } from "../../scripts/api.js";

async function answer(path, options) {
  const response = await api.fetchApi(`/carnator/${path}`, options);
  const body = await response.json().catch(() => ({}));
  if (!response.ok) throw new Error(body.error ?? `${response.status} ${response.statusText}`);
  return body;
}

/** Look something up; undefined values are left out of the query. */
export function ask(path, query = {}) {
  const given = Object.entries(query).filter(([, value]) => value !== undefined && value !== "");
  const text = new URLSearchParams(given).toString();
  return answer(text ? `${path}?${text}` : path);
}

/** Have something done. */
export function order(path, body) {
  return answer(path, {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(body),
  });
}

/** The address of a record's preview, for one picture; null when there is none. An <img> cannot
 * say whose page it is on, so the picture is fetched here. */
export async function preview(id, store) {
  const query = store ? `?store=${encodeURIComponent(store)}` : "";
  const response = await api.fetchApi(`/carnator/preview/${id}${query}`);
  return response.ok ? URL.createObjectURL(await response.blob()) : null;
}

/** A workflow of the pack, as the host serves it. */
export async function workflow(name) {
  const pack = new URL(".", import.meta.url).pathname.split("/").at(-2);
  const response = await api.fetchApi(`/workflow_templates/${pack}/${name}.json`);
  if (!response.ok) throw new Error(`${response.status} ${response.statusText}`);
  return response.json();
}

/** Tell the server whose prompts carry this page's id: with several users, each has records of
 * their own. */
export function introduce() {
  if (api.clientId) order("hello", { client: api.clientId }).catch(() => {});
}
