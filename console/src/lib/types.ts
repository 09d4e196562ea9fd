/** The API's answers under the names that the pages use. openapi.d.ts is generated from the OpenAPI document. */

import type { components } from "./openapi";

type Schemas = components["schemas"];

export type Session = Schemas["SessionOut"];
export type Job = Schemas["JobOut"];
export type JobEvent = Schemas["EventOut"];
export type Step = Schemas["StepMetrics"];
export type Checkpoint = Schemas["CheckpointOut"];
export type RolloutList = Schemas["RolloutListing"];
export type Rollout = RolloutList["data"][number];
export type PromptList = Schemas["PromptListing"];
export type Prompt = PromptList["data"][number];
export type Outcome = Prompt["outcome"];

export type List<T> = { data: T[]; has_more: boolean };
