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
  /** The budget: minutes of worker time. */
  minutes: string;
  grader: string;
  responseFormat: string;
  /** Texts by the path of the hyperparameter; no entry: the default. */
  hyperparameters: Record<string, string>;
  /** Fields of a cloned job that the form does not show, and those of its method. */
  rest: Record<string, unknown>;
  methodRest: Record<string, unknown>;
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
    minutes: "",
    grader: "",
    responseFormat: "",
    hyperparameters: {},
    rest: {},
    methodRest: {},
  };
}

/** The request that the form was filled with, with which its changes are compared. `id`: of the job that it created, or of nothing. */
type Origin = { name: string; id: string; request: Record<string, unknown> };

/** `from`: the id of the job that the form clones. */
export const form = $state<{ draft: Draft; from: string; origin: Origin | null }>({ draft: empty(), from: "", origin: null });

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
  const method: Record<string, unknown> = { ...draft.methodRest };
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
    budget: draft.minutes.trim() ? { gpu_seconds: secondsOf(draft.minutes) } : "",
  };
  return Object.fromEntries(Object.entries(made).filter(([, value]) => value !== ""));
}

/** A text that is no number is sent as it is, and the server says what is wrong with it. */
function secondsOf(minutes: string): unknown {
  const value = valueOf(minutes);
  return typeof value === "number" ? 60 * value : value;
}

/** The form of the request that created a job. */
export async function clone(id: string): Promise<Draft> {
  return draftOf(await get<Record<string, unknown>>(`/regraft/jobs/${id}/request`));
}

type Asked = { grader?: unknown; hyperparameters?: unknown; response_format?: unknown } & Record<string, unknown>;

/** The form of a request; fields that it does not show are in `rest`. */
function draftOf(request: Record<string, unknown>): Draft {
  const { model, training_file, validation_file, validation_split, method, suffix, seed, budget, ...rest } = request;
  const type = (method as { type: MethodName }).type;
  const { grader, hyperparameters, response_format, ...methodRest } = (method as Record<string, Asked | undefined>)[type] ?? {};
  const given = hyperparameters ? flat(hyperparameters) : {};
  const seconds = (budget as { gpu_seconds?: number } | undefined)?.gpu_seconds;
  return {
    ...empty(),
    model: text(model),
    method: type,
    trainingFile: text(training_file),
    validation: validation_split === undefined ? "file" : "split",
    validationFile: text(validation_file),
    validationSplit: text(validation_split) || "0.1",
    suffix: text(suffix),
    seed: text(seed),
    minutes: typeof seconds === "number" ? String(seconds / 60) : text(seconds),
    grader: grader ? JSON.stringify(grader, null, 2) : "",
    responseFormat: response_format ? JSON.stringify(response_format, null, 2) : "",
    hyperparameters: Object.fromEntries(
      Object.entries(given)
        .filter(([, value]) => value !== null)
        .map(([path, value]) => [path, text(value)]),
    ),
    rest: budget && seconds === undefined ? { ...rest, budget } : rest,
    methodRest: Object.fromEntries(Object.entries(methodRest).filter(([, value]) => value !== null)),
  };
}

function text(value: unknown): string {
  return value === undefined || value === null ? "" : typeof value === "string" ? value : JSON.stringify(value);
}

const METHODS: string[] = ["reinforcement", "supervised", "dpo", "reward_model"];
const OF_THE_METHOD = ["grader", "shadow_grader", "hyperparameters", "response_format", "tools", "max_episode_steps"];

const GRADERS = [
  ["grader", "grader", "paste it below"],
  ["shadow_grader", "shadow grader", "the form has none, so create the job with regraft jobs create -f FILE to keep it"],
] as const;

/** The form of a job file in JSON or TOML (docs/howto/cli.md), and what of it the form cannot take over. */
export async function imported(content: string): Promise<{ draft: Draft; notes: string[] }> {
  let fields = await table(content);
  const notes: string[] = [];
  if (Array.isArray(fields.stages)) {
    const stages = (fields.stages as { name?: unknown; job?: unknown }[]).filter((stage) => typeof stage.job === "object" && stage.job !== null);
    if (stages.length !== 1) throw new Error(`This is a pipeline with ${stages.length} jobs. Create it with: regraft pipelines create -f FILE`);
    notes.push(`The job is the stage “${text(stages[0]!.name)}” of a pipeline, whose other stages are left out.`);
    fields = stages[0]!.job as Record<string, unknown>;
  }
  const { method, ...others } = fields;
  const isOfTheMethod = ([name]: [string, unknown]): boolean => OF_THE_METHOD.includes(name);
  const top = Object.fromEntries(Object.entries(others).filter(isOfTheMethod)) as Asked;
  const rest = Object.fromEntries(Object.entries(others).filter((entry) => !isOfTheMethod(entry)));
  const kind = (method ?? {}) as Record<string, unknown>;
  const type = text(kind.type) || (top.grader !== undefined || kind.reinforcement !== undefined ? "reinforcement" : "supervised");
  if (!METHODS.includes(type)) throw new Error(`The form has no ${type} jobs. Create it with: regraft jobs create -f FILE`);
  const twice = OF_THE_METHOD.find((name) => name in top && name in ((kind[type] ?? {}) as object));
  if (twice) throw new Error(`${twice} is given at the top level and in the method.`);
  const inner: Asked = { ...((kind[type] ?? {}) as Asked), ...top };
  for (const [name, label, remedy] of GRADERS) {
    const value = inner[name];
    if (typeof value !== "string") continue;
    const stored = /^stored:([^@]+)(?:@(.+))?$/.exec(value);
    if (stored) inner[name] = { type: "stored", name: stored[1], ...(stored[2] ? { version: stored[2] } : {}) };
    else {
      notes.push(`The ${label} is in ${value}: ${remedy}.`);
      delete inner[name];
    }
  }
  for (const name of ["training_file", "validation_file"]) {
    const value = rest[name];
    if (typeof value === "string" && !/^file-[^./]+$/.test(value)) {
      notes.push(`${value} is a local file: upload it as the ${name.replace("_", " ")}.`);
      delete rest[name];
    }
  }
  return { draft: draftOf({ ...rest, method: { type, [type]: inner } }), notes };
}

async function table(content: string): Promise<Record<string, unknown>> {
  let value: unknown;
  if (content.trimStart().startsWith("{")) value = JSON.parse(content);
  else value = (await import("smol-toml")).parse(content); // loaded with the first such file
  if (typeof value !== "object" || value === null || Array.isArray(value)) throw new Error("A job file is a table of fields.");
  return value as Record<string, unknown>;
}

export type Difference = { field: string; before: unknown; after: unknown };

/** The fields that two requests have differently, by their dotted names. */
export function differences(before: Record<string, unknown>, after: Record<string, unknown>): Difference[] {
  const [one, other] = [flat(before), flat(after)];
  return [...new Set([...Object.keys(one), ...Object.keys(other)])]
    .sort()
    .filter((field) => JSON.stringify(one[field]) !== JSON.stringify(other[field]))
    .map((field) => ({ field, before: one[field], after: other[field] }));
}
