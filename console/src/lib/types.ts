/** The parts of the API's answers that the pages read. */

export type Session = { key_id: string; key_name: string; scope: string; project_id: string; project_name: string };

export type Verdict = {
  outcome: "improved" | "no_difference" | "worse";
  base_reward: number;
  tuned_reward: number;
  difference: number;
  ci_low: number | null;
  ci_high: number | null;
  wins: number;
  losses: number;
  ties: number;
  rows: number;
  step: number;
};

export type Job = {
  id: string;
  created_at: number;
  finished_at: number | null;
  estimated_finish: number | null;
  model: string;
  fine_tuned_model: string | null;
  status: string;
  training_file: string;
  validation_file: string | null;
  trained_tokens: number | null;
  error: { code: string; message: string; param: string | null } | null;
  seed: number;
  method: { type: string } & Record<string, unknown>;
  metadata: Record<string, string> | null;
  user_provided_suffix: string | null;
  usage_metrics: Record<string, unknown> | null;
  queue: { position: number; reason: string } | null;
  lineage: Record<string, unknown> | null;
  budget: Record<string, unknown> | null;
  verdict: Verdict | null;
};

export type JobEvent = {
  id: string;
  created_at: number;
  level: string;
  message: string;
  type: string;
  data: Record<string, unknown>;
};

export type Step = { step: number; total_steps?: number } & Record<string, unknown>;

export type Checkpoint = {
  id: string;
  step_number: number;
  fine_tuned_model_checkpoint: string | null;
  metrics: Record<string, number>;
};

export type Rollout = {
  id: string;
  step: number;
  split: "train" | "valid";
  group: number;
  member: number;
  line: number;
  messages: { role: string; content: unknown }[];
  item: Record<string, unknown>;
  output_text: string;
  output_reasoning: string | null;
  finish_reason: string;
  prompt_tokens: number;
  completion_tokens: number;
  score: number | null;
  reason: string | null;
  error: string | null;
  output: string | null;
  sub_scores: Record<string, number | null> | null;
  advantage: number | null;
  centered_reward: number | null;
  trained: boolean;
};

export type List<T> = { data: T[]; has_more: boolean };
