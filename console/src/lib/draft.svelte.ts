/** The job that the form is about to create. It survives a visit to another page. */

import { get } from "./api";
import { read } from "./graders";
import type { Grader } from "./types";

export type MethodName = "reinforcement" | "supervised" | "dpo" | "reward_model";
export type Draft = {
  model: string;
  method: MethodName;
  trainingFile: string;
  validation: "file" | "split";
  validationFile: string;
  validationSplit: string;
  suffix: string;
  seed: string;
  gpuSeconds: string;
  grader: string;
  responseFormat: string;
  /** Texts by the path of the hyperparameter; no entry: the default. */
  hyperparameters: Record<string, string>;
  /** Fields of a cloned job that the form does not show. */
  rest: Record<string, unknown>;
};

export function empty(): Draft {
  return {
    model: "",
    method: "reinforcement",
    trainingFile: "",
    validation: "file",
    validationFile: "",
    validationSplit: "0.1",
    suffix: "",
    seed: "",
    gpuSeconds: "",
    grader: "",
    responseFormat: "",
    hyperparameters: {},
    rest: {},
  };
}

export const form = $state<{ draft: Draft; from: string }>({ draft: empty(), from: "" });

/** A number, a list or an object where the text is JSON, else the text: `auto`, `cosine`. */
export function valueOf(text: string): unknown {
  try {
    return JSON.parse(text);
  } catch {
    return text.trim();
  }
}

/** Nested objects from values by path. */
function nested(values: Record<string, string>): Record<string, unknown> {
  const made: Record<string, unknown> = {};
  for (const [path, text] of Object.entries(values)) {
    const names = path.split(".");
    let at = made;
    for (const name of names.slice(0, -1)) at = (at[name] ??= {}) as Record<string, unknown>;
    at[names[names.length - 1]!] = valueOf(text);
  }
  return made;
}

/** Texts by path; lists and empty objects are values. */
export function flat(values: unknown, prefix = ""): Record<string, unknown> {
  const made: Record<string, unknown> = {};
  for (const [name, value] of Object.entries(values as Record<string, unknown>)) {
    if (typeof value === "object" && value !== null && !Array.isArray(value) && Object.keys(value).length) Object.assign(made, flat(value, `${prefix}${name}.`));
    else made[prefix + name] = value;
  }
  return made;
}

/** The body of POST /fine_tuning/jobs; fields without a value are left out, and `grader` replaces an unfinished one. */
export function body(draft: Draft, grader: Grader | null = read(draft.grader).grader): Record<string, unknown> {
  const method: Record<string, unknown> = {};
  if (draft.method === "reinforcement" && grader) method.grader = grader;
  if (Object.keys(draft.hyperparameters).length) method.hyperparameters = nested(draft.hyperparameters);
  if (draft.method === "reinforcement" && draft.responseFormat.trim()) method.response_format = valueOf(draft.responseFormat);
  const made: Record<string, unknown> = {
    ...draft.rest,
    model: draft.model,
    training_file: draft.trainingFile,
    validation_file: draft.validation === "file" ? draft.validationFile : "",
    validation_split: draft.validation === "split" ? valueOf(draft.validationSplit) : "",
    method: { type: draft.method, [draft.method]: method },
    suffix: draft.suffix,
    seed: draft.seed.trim() ? valueOf(draft.seed) : "",
    budget: draft.gpuSeconds.trim() ? { gpu_seconds: valueOf(draft.gpuSeconds) } : "",
  };
  return Object.fromEntries(Object.entries(made).filter(([, value]) => value !== ""));
}

/** The form of the request that created a job. */
export async function clone(id: string): Promise<Draft> {
  const { model, training_file, validation_file, method, suffix, seed, budget, ...rest } = await get<Record<string, unknown>>(`/regraft/jobs/${id}/request`);
  const type = (method as { type: MethodName }).type;
  const asked = (method as Record<string, { grader?: Grader; hyperparameters?: unknown; response_format?: unknown }>)[type] ?? {};
  const given = asked.hyperparameters ? flat(asked.hyperparameters) : {};
  return {
    ...empty(),
    model: String(model),
    method: type,
    trainingFile: String(training_file),
    validationFile: validation_file ? String(validation_file) : "",
    suffix: suffix ? String(suffix) : "",
    seed: seed === undefined ? "" : String(seed),
    gpuSeconds: budget ? String((budget as { gpu_seconds: number }).gpu_seconds) : "",
    grader: asked.grader ? JSON.stringify(asked.grader, null, 2) : "",
    responseFormat: asked.response_format ? JSON.stringify(asked.response_format, null, 2) : "",
    hyperparameters: Object.fromEntries(
      Object.entries(given)
        .filter(([, value]) => value !== null)
        .map(([path, value]) => [path, typeof value === "string" ? value : JSON.stringify(value)]),
    ),
    rest,
  };
}
