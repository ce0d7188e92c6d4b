// The gateway's answers. The key stays in this tab.

const KEEP = "moonpool.key";

export class Locked extends Error {} // a key is needed, or this one does not do
export class Away extends Error {} // no answer, or none that helps

export const key = {
  get: () => sessionStorage.getItem(KEEP) ?? "",
  set: (value) => sessionStorage.setItem(KEEP, value),
  forget: () => sessionStorage.removeItem(KEEP),
};

export async function ask(path) {
  const headers = key.get() ? { authorization: `Bearer ${key.get()}` } : {};
  let answer;
  try {
    answer = await fetch(`console/api/${path}`, { headers, cache: "no-store", signal: AbortSignal.timeout(10000) });
  } catch {
    throw new Away("the gateway does not answer");
  }
  if (answer.ok) return answer.json();
  const said = await answer.json().catch(() => ({}));
  const why = said?.error?.message ?? `HTTP ${answer.status}`;
  if (answer.status === 401 || (answer.status === 403 && key.get())) throw new Locked(why);
  throw new Away(why);
}
