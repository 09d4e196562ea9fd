/** What the OpenAPI document says of a hyperparameter. The pages show it; only the server validates. */

import { ApiError } from "./api";

export type Schema = {
  $ref?: string;
  type?: string | string[];
  const?: unknown;
  enum?: unknown[];
  anyOf?: Schema[];
  oneOf?: Schema[];
  properties?: Record<string, Schema>;
  required?: string[];
  description?: string;
  minimum?: number;
  maximum?: number;
  exclusiveMinimum?: number;
  exclusiveMaximum?: number;
};
export type Schemas = Record<string, Schema>;

let loaded: Promise<Schemas> | null = null;

/** The schemas of the API, which are loaded once and only by pages that need them. */
export function schemas(): Promise<Schemas> {
  loaded ??= fetch("/openapi.json").then(async (answer) => {
    if (!answer.ok) throw new ApiError(answer.status, "The OpenAPI document could not be loaded.");
    return ((await answer.json()) as { components: { schemas: Schemas } }).components.schemas;
  });
  loaded.catch(() => (loaded = null));
  return loaded;
}

/** The alternatives of a schema, with references followed. */
export function branches(of: Schemas, schema: Schema | undefined): Schema[] {
  if (!schema) return [];
  if (schema.$ref) return branches(of, of[schema.$ref.split("/").at(-1)!]);
  const options = schema.anyOf ?? schema.oneOf;
  return options ? options.flatMap((one) => branches(of, one)) : [schema];
}

/** The variant of an object that has this `type`, or its only one. */
function variants(of: Schemas, schema: Schema | undefined, type: unknown): Schema[] {
  const objects = branches(of, schema).filter((one) => one.properties);
  const chosen = objects.filter((one) => one.properties!.type?.const === type);
  return chosen.length ? chosen : objects;
}

export type Hint = { options: string[]; range: string; description: string };

/** The allowed values of the hyperparameter at `path`; `values` has the types of its groups. */
export function hint(of: Schemas, root: string, path: string[], values: Record<string, unknown>): Hint {
  let objects = branches(of, of[root]);
  let at: unknown = values;
  for (const name of path.slice(0, -1)) {
    at = (at as Record<string, unknown> | null | undefined)?.[name];
    const type = (at as Record<string, unknown> | null | undefined)?.type;
    objects = objects.flatMap((one) => variants(of, one.properties?.[name], type));
  }
  const last = path[path.length - 1]!;
  // All variants, for the field that selects one.
  const parents = last === "type" ? everyVariant(of, root, path) : objects;
  const found = parents.map((one) => one.properties?.[last]).filter((one) => one !== undefined);
  const leaves = found.flatMap((one) => branches(of, one));
  const isClosed = leaves.every((one) => one.const !== undefined || one.enum !== undefined || one.type === "boolean");
  const options = leaves.flatMap((one) => (one.type === "boolean" ? [true, false] : (one.enum ?? (one.const === undefined ? [] : [one.const]))));
  const number = leaves.find((one) => one.type === "integer" || one.type === "number");
  return {
    options: isClosed ? [...new Set(options.map(String))] : [],
    range: number ? bounds(number) : "",
    description: found.find((one) => one.description)?.description ?? "",
  };
}

function everyVariant(of: Schemas, root: string, path: string[]): Schema[] {
  let objects = branches(of, of[root]);
  for (const name of path.slice(0, -1)) objects = objects.flatMap((one) => branches(of, one.properties?.[name]).filter((inner) => inner.properties));
  return objects;
}

function bounds(schema: Schema): string {
  const low = schema.minimum !== undefined ? `from ${schema.minimum}` : schema.exclusiveMinimum !== undefined ? `above ${schema.exclusiveMinimum}` : "";
  const high = schema.maximum !== undefined ? `to ${schema.maximum}` : schema.exclusiveMaximum !== undefined ? `below ${schema.exclusiveMaximum}` : "";
  return [schema.type === "integer" ? "integer" : "number", low, high].filter(Boolean).join(" ");
}
