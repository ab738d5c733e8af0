// The OpenAPI description as a page of its own: the usual viewers load scripts from elsewhere.

import { element } from "./board.js";

const dark = matchMedia("(prefers-color-scheme: dark)").matches;
document.documentElement.dataset.theme = dark ? "dark" : "light";

const description = await (await fetch("openapi.json")).json();

/** Put what a reference points to in its place. */
function resolve(schema) {
  if (Array.isArray(schema)) return schema.map(resolve);
  if (schema === null || typeof schema !== "object") return schema;
  if (schema.$ref) return resolve(description.components.schemas[schema.$ref.split("/").at(-1)]);
  return Object.fromEntries(Object.entries(schema).filter(([key]) => key !== "title").map(([key, value]) => [key, resolve(value)]));
}

function block(title, schema) {
  const made = element("details");
  made.append(element("summary", "", title), element("pre", "", JSON.stringify(resolve(schema), null, 2)));
  return made;
}

for (const [path, methods] of Object.entries(description.paths)) {
  for (const [method, operation] of Object.entries(methods)) {
    const card = element("section", "card");
    card.append(element("h2", "", `${method.toUpperCase()} ${path}`), element("p", "", operation.description ?? ""));
    const body = operation.requestBody?.content?.["application/json"]?.schema;
    if (body) card.append(block("body", body));
    for (const [status, answer] of Object.entries(operation.responses)) {
      const schema = Object.values(answer.content ?? {})[0]?.schema ?? {};
      card.append(block(`${status}: ${answer.description}`, schema));
    }
    document.getElementById("paths").append(card);
  }
}
