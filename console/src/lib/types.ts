/** The API's answers under the names that the pages use. openapi.d.ts is generated from the OpenAPI document. */

import type { components } from "./openapi";

type Schemas = components["schemas"];

export type Session = Schemas["SessionOut"];
export type Job = Schemas["JobOut"];
export type Progress = NonNullable<Job["progress"]>;
export type JobEvent = Schemas["EventOut"];
export type Attempt = Schemas["AttemptOut"];
export type Step = Schemas["StepMetrics"];
export type Curve = Schemas["CurveOut"];
export type Checkpoint = Schemas["CheckpointOut"];
export type RolloutList = Schemas["RolloutListing"];
export type Rollout = RolloutList["data"][number];
export type RolloutTokens = Schemas["RolloutTokens"];
export type PromptList = Schemas["PromptListing"];
export type Prompt = PromptList["data"][number];
export type Outcome = Prompt["outcome"];
export type FileInfo = Schemas["FileOut"];
export type FileProfile = Schemas["ProfileOut"];
export type Model = Schemas["ModelOut"];
export type Alias = Schemas["AliasOut"];
export type AliasChange = Schemas["AliasChangeOut"];
export type BaseModel = Schemas["BaseModelOut"];
export type Estimate = Schemas["EstimateOut"];
export type Preview = Schemas["PreviewOut"];
export type PreviewAnswer = Schemas["PreviewAnswerOut"];
export type JobValidation = Schemas["JobValidation"];

export type Pipeline = Schemas["PipelineOut"];
export type Stage = Schemas["StageOut"];

export type Key = Schemas["KeyOut"];
export type NewKey = Schemas["NewKeyOut"];
export type Limits = Schemas["LimitsOut"];
export type Usage = Schemas["UsageOut"];
export type UsageReport = Schemas["UsageReport"];
export type Worker = Schemas["WorkerOut"];
export type Queue = Schemas["WorkQueueOut"];
export type WhatIf = Schemas["WhatIfOut"];
export type Attribution = Schemas["AttributionOut"];
export type JobComparison = Schemas["JobComparison"];
export type JobLedger = Schemas["JobLedger"];
export type LedgerBucket = Schemas["LedgerBucket"];
export type ComparedPair = Schemas["ComparedPair"];
export type Regrade = Schemas["RegradeOut"];
export type RegradedAnswer = Schemas["RegradedOut"];
export type StoredGrader = Schemas["StoredGraderOut"];
export type GraderVersion = Schemas["GraderVersionOut"];
export type GoldenCase = Schemas["GoldenCaseOut"];
export type GraderCheck = Schemas["GraderCheckOut"];
export type CheckedCase = GraderCheck["results"][number];
export type GraderAudit = Schemas["GraderAuditOut"];
export type GraderAuditReport = NonNullable<GraderAudit["report"]>;
export type AuditEntry = Schemas["AuditOut"];
export type WebhookEndpoint = Schemas["WebhookEndpointOut"];
export type NewWebhookEndpoint = Schemas["WebhookEndpointWithSecret"];
export type Delivery = Schemas["WebhookDeliveryOut"];
export type WebhookTest = Schemas["WebhookEndpointTestOut"];
export type Deleted = Schemas["Deleted"];

export type Grader = { type?: unknown; [name: string]: unknown };
/** The response of graders/run, which has no schema in the OpenAPI document. */
export type GraderReport = {
  reward: number;
  sub_rewards: Record<string, number>;
  metadata: {
    errors: Record<string, unknown>;
    scores: Record<string, number | null>;
    reason: string;
    output: string;
    execution_time: number;
  };
};

export type List<T> = { data: T[]; has_more: boolean };
