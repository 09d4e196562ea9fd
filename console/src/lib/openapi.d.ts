// Written by .ci/console_types.py from the OpenAPI document; do not edit.
export type paths = Record<string, never>;
export type webhooks = Record<string, never>;
export interface components {
    schemas: {
        /**
         * AdvantageSizesOut
         * @description The absolute advantages of the graded answers.
         */
        AdvantageSizesOut: {
            /** Mean */
            mean: number | null;
            /** Largest */
            largest: number | null;
        };
        /**
         * AliasChangeOut
         * @description A change of an alias.
         */
        AliasChangeOut: {
            /** Id */
            id: string;
            /**
             * Object
             * @default regraft.alias.change
             * @constant
             */
            object: "regraft.alias.change";
            /** Name */
            name: string;
            /**
             * Previous Model
             * @description Null: the alias was created.
             */
            previous_model: string | null;
            /**
             * Model
             * @description The model that answered from then on. Null: it was deleted.
             */
            model: string | null;
            /** Changed At */
            changed_at: number;
            /**
             * Changed By
             * @description The id of an API key or a login, or `operator`.
             */
            changed_by: string;
        };
        /**
         * AliasOut
         * @description A name of the project's own for a model.
         */
        AliasOut: {
            /** Id */
            id: string;
            /**
             * Object
             * @default regraft.alias
             * @constant
             */
            object: "regraft.alias";
            /** Name */
            name: string;
            /**
             * Model
             * @description The model that answers.
             */
            model: string;
            /**
             * Previous Model
             * @description The model that a rollback restores.
             */
            previous_model: string | null;
            /** Created At */
            created_at: number;
            /**
             * Updated At
             * @description When it was last pointed at another model.
             */
            updated_at: number;
            /**
             * Hidden
             * @description Whether a model of the registry has the name, and answers in its place.
             */
            hidden: boolean;
        };
        /** AttemptOut */
        AttemptOut: {
            /** Number */
            number: number;
            /** Kind */
            kind: string;
            /** Started At */
            started_at: number;
            /** Ended At */
            ended_at: number | null;
            /** Outcome */
            outcome: string | null;
            /** Reason */
            reason: string | null;
            /** Resumed From Step */
            resumed_from_step: number | null;
        };
        /**
         * AuditOut
         * @description One change, in the shape of OpenAI's audit log.
         */
        AuditOut: {
            /** Id */
            id: string;
            /**
             * Object
             * @default organization.audit_log
             * @constant
             */
            object: "organization.audit_log";
            /** Type */
            type: string;
            /** Effective At */
            effective_at: number;
            /** Actor */
            actor: {
                [key: string]: unknown;
            };
            /** Project */
            project: {
                [key: string]: string | null;
            };
            /** Target */
            target: string;
            /** Request Id */
            request_id: string | null;
            /** Data */
            data: {
                [key: string]: unknown;
            };
        };
        /**
         * BaseModelOut
         * @description A base model of the registry. The fields after `sampler` are null until a worker has tried the model.
         */
        BaseModelOut: {
            /** Id */
            id: string;
            /**
             * Object
             * @default regraft.model
             * @constant
             */
            object: "regraft.model";
            /** Aliases */
            aliases: string[];
            /** Context */
            context: number;
            /** Dtype */
            dtype: string;
            /** Gpu Class */
            gpu_class: string;
            /** Sampler */
            sampler: ("transformers" | "vllm") | null;
            /** Forward */
            forward?: string | null;
            /** Decode */
            decode?: string | null;
            /** Largest Difference */
            largest_difference?: number | null;
            /** Adapted Modules */
            adapted_modules?: number | null;
            /** Adapted Share */
            adapted_share?: number | null;
            /** Adapted By Kind */
            adapted_by_kind?: {
                [key: string]: components["schemas"]["KindOut"];
            } | null;
            /** Reasons */
            reasons?: boolean | null;
            template?: components["schemas"]["TemplateFacts"] | null;
            memory?: components["schemas"]["ModelMemory"] | null;
            /** Checked At */
            checked_at?: number | null;
            /** Versions */
            versions?: {
                [key: string]: string;
            } | null;
            /** Outdated */
            outdated?: boolean | null;
        };
        /** ByGrader */
        ByGrader: {
            /**
             * Graders
             * @default []
             */
            graders: {
                [key: string]: unknown;
            }[];
        };
        /**
         * ChangedField
         * @description A field that the requests do not all have with the same value, by its dotted name.
         */
        ChangedField: {
            /** Field */
            field: string;
            /**
             * Values
             * @description In the order of the jobs; null: the request lacks it.
             */
            values: unknown[];
        };
        /**
         * CheckedCaseOut
         * @description A golden case and its score. Null: it could not be graded, which fails the case.
         */
        CheckedCaseOut: {
            /** Case Id */
            case_id: string;
            /** Passed */
            passed: boolean;
            /** Score */
            score: number | null;
            expect: components["schemas"]["ExpectOut"];
            /** Reason */
            reason: string;
            /** Errors */
            errors: string[];
            /**
             * Output
             * @description Printed by the grader.
             */
            output: string;
            /**
             * Scores
             * @description Of the parts of a multi grader.
             */
            scores: {
                [key: string]: number | null;
            };
            /** Execution Time */
            execution_time: number;
        };
        /** CheckpointOut */
        CheckpointOut: {
            /** Id */
            id: string;
            /**
             * Object
             * @default fine_tuning.job.checkpoint
             * @constant
             */
            object: "fine_tuning.job.checkpoint";
            /** Created At */
            created_at: number;
            /** Fine Tuned Model Checkpoint */
            fine_tuned_model_checkpoint: string | null;
            /** Fine Tuning Job Id */
            fine_tuning_job_id: string;
            /** Step Number */
            step_number: number;
            /** Metrics */
            metrics: {
                [key: string]: number;
            };
            /** Adapter */
            adapter: string | null;
        };
        /**
         * ComparedJob
         * @description A job of a comparison.
         */
        ComparedJob: {
            /** Job Id */
            job_id: string;
            /**
             * Model
             * @description The delivered model; the base model before there is one.
             */
            model: string;
            /**
             * Step
             * @description Of the validation that counts; null: the job has stored none.
             */
            step: number | null;
            /**
             * Gpu Seconds
             * @description Of its recorded steps.
             */
            gpu_seconds: number;
            /** @description Of these GPU-seconds; null: the service has no price. */
            cost: components["schemas"]["Money"] | null;
        };
        /**
         * ComparedPair
         * @description A job minus the first one, over the validation prompts that both have.
         */
        ComparedPair: {
            /** Job Id */
            job_id: string;
            /** Prompts */
            prompts: number;
            /**
             * Unpaired
             * @description Prompts that only one of the two jobs has.
             */
            unpaired: number;
            /** @description Of the mean reward of a prompt; `first` is the first job. */
            reward: components["schemas"]["Difference"] | null;
            /**
             * Same Grader
             * @description If not, the rewards are not on one scale.
             */
            same_grader: boolean;
        };
        /**
         * ComparedScores
         * @description The stored scores of a job's answers beside others, of all selected answers.
         */
        ComparedScores: {
            /** Answers */
            answers: number;
            /**
             * Groups
             * @description Groups with at least two answers.
             */
            groups: number;
            before: components["schemas"]["RewardsOut"];
            after: components["schemas"]["RewardsOut"];
            /** Higher */
            higher: number;
            /** Lower */
            lower: number;
            /** Same */
            same: number;
            /**
             * Gained
             * @description Answers that have a score only in the new ones.
             */
            gained: number;
            /**
             * Lost
             * @description Answers that have none in the new ones.
             */
            lost: number;
            /** Now Passed */
            now_passed: number;
            /** Now Failed */
            now_failed: number;
            /**
             * Changed Signs
             * @description Answers whose reward, minus the mean of their group, has the opposite sign.
             */
            changed_signs: number;
            /**
             * Rank Correlation
             * @description Spearman's, of the stored and the new scores.
             */
            rank_correlation: number | null;
        };
        /**
         * CurveOut
         * @description The validations of a job in order, thinned.
         */
        CurveOut: {
            /**
             * Object
             * @default regraft.curve
             * @constant
             */
            object: "regraft.curve";
            /** Job Id */
            job_id: string;
            /**
             * Metric
             * @description `full_valid_mean_reward`, or `full_valid_loss` of jobs without rewards; null: no validation.
             */
            metric: string | null;
            /**
             * Steps
             * @description Of the validations, at most 60 of them.
             */
            steps: number[];
            /**
             * Values
             * @description The first is that of the model that the job started from.
             */
            values: number[];
            /**
             * Step
             * @description The last one; null: none has been recorded.
             */
            step: number | null;
            /** Total Steps */
            total_steps: number | null;
        };
        /** Deleted */
        Deleted: {
            /** Id */
            id: string;
            /** Object */
            object: string;
            /**
             * Deleted
             * @default true
             * @constant
             */
            deleted: true;
        };
        /**
         * Difference
         * @description The second run minus the first, over the rows that both graded; the interval is that of Student's t.
         */
        Difference: {
            /** Compared */
            compared: number;
            /**
             * Ungraded
             * @description Paired rows that one of the runs could not grade.
             */
            ungraded: number;
            /** First */
            first: number | null;
            /** Second */
            second: number | null;
            /** Difference */
            difference: number | null;
            /** Standard Error */
            standard_error: number | null;
            /**
             * Ci Low
             * @description Lower end of the 95 % interval; null: fewer than two rows.
             */
            ci_low: number | null;
            /** Ci High */
            ci_high: number | null;
            /**
             * Wins
             * @description Rows on which the second run is better.
             */
            wins: number;
            /** Losses */
            losses: number;
            /** Ties */
            ties: number;
        };
        /**
         * Duplicates
         * @description Rows whose prompt occurs in an earlier row.
         */
        Duplicates: {
            /** Rows */
            rows: number;
            /**
             * Identical
             * @description Of these, rows that equal an earlier row in every field.
             */
            identical: number;
            /**
             * Prompts
             * @description Different prompts that occur more than once.
             */
            prompts: number;
            /**
             * Lines
             * @description The first lines of the first such prompts.
             */
            lines: number[][];
        };
        /**
         * EstimateOut
         * @description The estimate of a job. Jobs that sample no answers have no `group_size` and no `max_completion_tokens`.
         */
        EstimateOut: {
            /** Model */
            model: string;
            /** Gpu Class */
            gpu_class: string;
            /** Training Rows */
            training_rows: number;
            /** Validation Rows */
            validation_rows: number;
            /** N Epochs */
            n_epochs: number;
            /** Batch Size */
            batch_size: number;
            /** Total Steps */
            total_steps: number;
            /**
             * Estimate
             * @description In the shape of a job's estimate.
             */
            estimate: {
                [key: string]: unknown;
            } | null;
            /**
             * Reason
             * @description Reason for a missing estimate.
             */
            reason: string | null;
            /**
             * Warnings
             * @description Accepted parameters without effect, as in the job's events.
             */
            warnings: string[];
            /**
             * Object
             * @default regraft.estimate
             * @constant
             */
            object: "regraft.estimate";
            /** @description The newest preview of this request. */
            preview?: components["schemas"]["PreviewedOut"] | null;
            /** Group Size */
            group_size?: number | null;
            /** Max Completion Tokens */
            max_completion_tokens?: number | null;
        };
        /** EventOut */
        EventOut: {
            /** Id */
            id: string;
            /**
             * Object
             * @default fine_tuning.job.event
             * @constant
             */
            object: "fine_tuning.job.event";
            /** Created At */
            created_at: number;
            /** Level */
            level: string;
            /** Message */
            message: string;
            /** Type */
            type: string;
            /** Data */
            data: components["schemas"]["StepMetrics"] | {
                [key: string]: unknown;
            };
        };
        /**
         * ExpectOut
         * @description The scores that pass, both bounds included.
         */
        ExpectOut: {
            /**
             * Min
             * @description null: no lower bound.
             */
            min: number | null;
            /**
             * Max
             * @description null: no upper bound.
             */
            max: number | null;
        };
        /** FileOut */
        FileOut: {
            /** Id */
            id: string;
            /**
             * Object
             * @default file
             * @constant
             */
            object: "file";
            /** Bytes */
            bytes: number;
            /** Created At */
            created_at: number;
            /** Expires At */
            expires_at: number | null;
            /** Filename */
            filename: string;
            /** Purpose */
            purpose: string;
            /**
             * Status
             * @default processed
             * @constant
             */
            status: "processed";
            /** Status Details */
            status_details?: null;
        };
        /**
         * FindingOut
         * @description A check of `regraft-server doctor` as it last ended on the worker's machine.
         */
        FindingOut: {
            /** Check */
            check: string;
            /**
             * State
             * @enum {string}
             */
            state: "ok" | "warning" | "failed" | "skipped";
            /** Text */
            text: string;
            /**
             * Remedy
             * @description Empty unless it failed or warns.
             */
            remedy: string;
            /** Checked At */
            checked_at: number;
        };
        /**
         * GoldenCaseOut
         * @description An answer and its row, with the scores that all versions of a grader must give it.
         */
        GoldenCaseOut: {
            /** Id */
            id: string;
            /**
             * Object
             * @default regraft.grader.case
             * @constant
             */
            object: "regraft.grader.case";
            /** Created At */
            created_at: number;
            /** Sample */
            sample: {
                [key: string]: unknown;
            };
            /** Item */
            item: {
                [key: string]: unknown;
            };
            expect: components["schemas"]["ExpectOut"];
            /** Note */
            note: string;
            /** Rollout Id */
            rollout_id: string | null;
        };
        /**
         * GpuOut
         * @description A GPU by nvidia-smi. null: the driver does not say.
         */
        GpuOut: {
            /** Index */
            index: string;
            /** Name */
            name: string;
            /** Memory Used Bytes */
            memory_used_bytes: number | null;
            /** Memory Total Bytes */
            memory_total_bytes: number | null;
            /**
             * Utilization
             * @description Of the last sample period, from 0 to 1.
             */
            utilization: number | null;
        };
        /**
         * GraderCheckOut
         * @description The golden cases of a stored grader, run with one of its versions or with another specification.
         */
        GraderCheckOut: {
            /**
             * Object
             * @default regraft.grader.check
             * @constant
             */
            object: "regraft.grader.check";
            /** Name */
            name: string;
            /**
             * Version
             * @description The version of what was run, saved or not.
             */
            version: string;
            /** Passed */
            passed: number;
            /**
             * Failed
             * @description Cases out of their range, or without a score.
             */
            failed: number;
            /** Results */
            results: components["schemas"]["CheckedCaseOut"][];
        };
        /**
         * GraderPath
         * @description A path that the grader reads, and the rows that lack it.
         */
        GraderPath: {
            /** Path */
            path: string;
            missing: components["schemas"]["SomeLines"];
        };
        /**
         * GraderReads
         * @description The fields that the templates of a grader read, and the rows that it can learn nothing from.
         */
        GraderReads: {
            /** Paths */
            paths: components["schemas"]["GraderPath"][];
            /**
             * Not Listed
             * @description A python grader or an endpoint may read other fields as well.
             */
            not_listed: boolean;
            /** @description Rows for which a select grader has no grader; null: it is not one. */
            no_grader: components["schemas"]["SomeLines"] | null;
            /** @description Rows in whose reference a text_similarity finds no word, which a job rejects. */
            no_word: components["schemas"]["SomeLines"];
            /**
             * Doubts
             * @description A job accepts these rows, and warns of them.
             */
            doubts: components["schemas"]["RowDoubt"][];
        };
        /**
         * GraderVersionOut
         * @description A version of a stored grader. `id` is its hash.
         */
        GraderVersionOut: {
            /** Id */
            id: string;
            /**
             * Object
             * @default regraft.grader.version
             * @constant
             */
            object: "regraft.grader.version";
            /** Name */
            name: string;
            /** Version */
            version: string;
            /** Created At */
            created_at: number;
            /** Is Current */
            is_current: boolean;
            /** Note */
            note: string;
            /** Grader */
            grader: {
                [key: string]: unknown;
            };
        };
        /**
         * Grading
         * @description Statistics of the grader. Seconds are of one grade among concurrent ones, as in a job.
         */
        Grading: {
            /** Failed */
            failed: number;
            /**
             * Reasons
             * @description Most frequent first, at most three.
             */
            reasons: string[];
            seconds: components["schemas"]["Spread"];
            /**
             * Tokens
             * @description Read and generated by judges.
             */
            tokens: number;
        };
        /**
         * JobComparison
         * @description The first job beside the others. Each interval is that of its pair alone.
         */
        JobComparison: {
            /**
             * Object
             * @default regraft.job.comparison
             * @constant
             */
            object: "regraft.job.comparison";
            /** Jobs */
            jobs: components["schemas"]["ComparedJob"][];
            /**
             * Pairs
             * @description One for each of the other jobs.
             */
            pairs: components["schemas"]["ComparedPair"][];
            /** Config */
            config: components["schemas"]["ChangedField"][];
        };
        /**
         * JobOut
         * @description Every key of OpenAI's job is always present, with null for no value.
         */
        JobOut: {
            /** Id */
            id: string;
            /**
             * Object
             * @default fine_tuning.job
             * @constant
             */
            object: "fine_tuning.job";
            /** Created At */
            created_at: number;
            /** Finished At */
            finished_at: number | null;
            /** Estimated Finish */
            estimated_finish: number | null;
            /** Model */
            model: string;
            /** Fine Tuned Model */
            fine_tuned_model: string | null;
            /** Organization Id */
            organization_id: string;
            /** Status */
            status: string;
            /** Training File */
            training_file: string;
            /** Validation File */
            validation_file: string | null;
            /** Result Files */
            result_files: string[];
            /** Trained Tokens */
            trained_tokens: number | null;
            /** Error */
            error: {
                /** Code */
                code: string;
                /** Message */
                message: string;
                /** Param */
                param: string | null;
            } | null;
            /** Seed */
            seed: number;
            /** Hyperparameters */
            hyperparameters: {
                [key: string]: unknown;
            } | null;
            /**
             * MethodOut
             * @description The method, and under its type its object, as in the request.
             */
            method: {
                /**
                 * Type
                 * @enum {string}
                 */
                type: "supervised" | "dpo" | "reward_model" | "reinforcement" | "distillation";
            } & {
                [key: string]: unknown;
            };
            /** Integrations */
            integrations: unknown[];
            /** Metadata */
            metadata: {
                [key: string]: string;
            } | null;
            /** User Provided Suffix */
            user_provided_suffix: string | null;
            /** Usage Metrics */
            usage_metrics: {
                [key: string]: unknown;
            } | null;
            queue: components["schemas"]["QueueOut"] | null;
            /**
             * Shared With Openai
             * @default false
             * @constant
             */
            shared_with_openai: false;
            /** Eval Id */
            eval_id: string | null;
            /** Lineage */
            lineage: {
                [key: string]: unknown;
            } | null;
            /** Budget */
            budget: {
                [key: string]: unknown;
            } | null;
            /** Estimate */
            estimate: {
                [key: string]: unknown;
            } | null;
            result: components["schemas"]["ResultOut"] | null;
            verdict: components["schemas"]["VerdictOut"] | null;
            progress: components["schemas"]["ProgressOut"] | null;
            preview: components["schemas"]["PreviewedOut"] | null;
        };
        /**
         * JobValidation
         * @description The job as it would be created.
         */
        JobValidation: {
            /**
             * Object
             * @default regraft.job_validation
             * @constant
             */
            object: "regraft.job_validation";
            /** Model */
            model: string;
            /** Method */
            method: {
                [key: string]: unknown;
            };
            /** Warnings */
            warnings: string[];
        };
        /** KeyOut */
        KeyOut: {
            /** Id */
            id: string;
            /**
             * Object
             * @default organization.project.api_key
             * @constant
             */
            object: "organization.project.api_key";
            /** Name */
            name: string;
            /** Redacted Value */
            redacted_value: string;
            /** Scope */
            scope: string;
            /** Owner */
            owner: string;
            /** Created At */
            created_at: number;
            /** Expires At */
            expires_at: number | null;
            /** Revoked At */
            revoked_at: number | null;
            /** Last Used At */
            last_used_at: number | null;
        };
        /**
         * KindOut
         * @description The adapted layers of one kind.
         */
        KindOut: {
            /** Modules */
            modules: number;
            /** Share */
            share: number;
        };
        /**
         * LengthBin
         * @description Rows of at least `low` and less than `high`.
         */
        LengthBin: {
            /** Low */
            low: number;
            /** High */
            high: number;
            /** Rows */
            rows: number;
        };
        /**
         * Lengths
         * @description The distribution of a length over rows.
         */
        Lengths: {
            /** Rows */
            rows: number;
            /** Mean */
            mean: number;
            /** Min */
            min: number;
            /** P50 */
            p50: number;
            /** P90 */
            p90: number;
            /** P99 */
            p99: number;
            /** Max */
            max: number;
            /** Bins */
            bins: components["schemas"]["LengthBin"][];
        };
        /**
         * LimitsOut
         * @description The effective limits, including the operator's defaults; null: unlimited.
         */
        LimitsOut: {
            /** Running Jobs */
            running_jobs?: number | null;
            /** Queued Jobs */
            queued_jobs?: number | null;
            /** Running Eval Runs */
            running_eval_runs?: number | null;
            /** Queued Eval Runs */
            queued_eval_runs?: number | null;
            /** Storage Bytes */
            storage_bytes?: number | null;
            /** Gpu Seconds Per 30 Days */
            gpu_seconds_per_30_days?: number | null;
            /** Grader Tokens Per 30 Days */
            grader_tokens_per_30_days?: number | null;
            /** Requests Per Minute */
            requests_per_minute?: number | null;
            /**
             * Object
             * @default organization.project.limits
             * @constant
             */
            object: "organization.project.limits";
        };
        /**
         * ModelMemory
         * @description Memory of one GPU, in GiB, of a job with an adapter of rank 16 and answers that fill the context.
         */
        ModelMemory: {
            /** Gpu Class */
            gpu_class: string;
            /** Gpu Gib */
            gpu_gib: number;
            /** Needed Gib */
            needed_gib: number | null;
            /** Problem */
            problem: string | null;
        };
        /** ModelOut */
        ModelOut: {
            /** Id */
            id: string;
            /**
             * Object
             * @default model
             * @constant
             */
            object: "model";
            /** Created */
            created: number;
            /** Owned By */
            owned_by: string;
            /**
             * Root
             * @description The base model, or the model that an alias points at.
             */
            root: string;
            /**
             * Parent
             * @description The model that a tuned model was trained from: a base model or another tuned model.
             */
            parent: string | null;
            /** Shutdown Date */
            shutdown_date?: null;
            /**
             * Kind
             * @enum {string}
             */
            kind: "base" | "alias" | "tuned" | "reward_model";
            /**
             * Checkpoint Id
             * @description Of the archive. Null for base models, aliases and models of other projects.
             */
            checkpoint_id?: string | null;
        };
        /**
         * Money
         * @description An amount of money.
         */
        Money: {
            /** Amount */
            amount: number;
            /**
             * Currency
             * @description ISO 4217.
             */
            currency: string;
        };
        /** NewKeyOut */
        NewKeyOut: {
            /** Id */
            id: string;
            /**
             * Object
             * @default organization.project.api_key
             * @constant
             */
            object: "organization.project.api_key";
            /** Name */
            name: string;
            /** Redacted Value */
            redacted_value: string;
            /** Scope */
            scope: string;
            /** Owner */
            owner: string;
            /** Created At */
            created_at: number;
            /** Expires At */
            expires_at: number | null;
            /** Revoked At */
            revoked_at: number | null;
            /** Last Used At */
            last_used_at: number | null;
            /** Value */
            value: string;
        };
        /**
         * Overlap
         * @description Rows of the validation file whose prompt is also in this file.
         */
        Overlap: {
            /** File */
            file: string;
            /**
             * Rows
             * @description Valid rows of the validation file.
             */
            rows: number;
            /** Shared */
            shared: number;
            /**
             * Lines
             * @description Pairs: a line of the validation file, and one of this file.
             */
            lines: number[][];
        };
        /** PhaseSeconds */
        PhaseSeconds: {
            /**
             * Sampling
             * @description Seconds of the phase sampling.
             * @default 0
             */
            sampling: number;
            /**
             * Grading
             * @description Seconds of the phase grading, beyond sampling.
             * @default 0
             */
            grading: number;
            /**
             * Training
             * @description Seconds of the phase training.
             * @default 0
             */
            training: number;
            /**
             * Eval
             * @description Seconds of the validation.
             * @default 0
             */
            eval: number;
            /**
             * Waiting
             * @description Seconds of waiting for other jobs on the same device.
             * @default 0
             */
            waiting: number;
            /**
             * Full Iteration
             * @description Seconds of the whole step.
             * @default 0
             */
            full_iteration: number;
        };
        /**
         * PipelineOut
         * @description Named stages, each a job or a file made from the results of others.
         */
        PipelineOut: {
            /** Id */
            id: string;
            /**
             * Object
             * @default regraft.pipeline
             */
            object: string;
            /** Created At */
            created_at: number;
            /** Finished At */
            finished_at: number | null;
            /** Name */
            name: string | null;
            /**
             * Status
             * @description running, paused, succeeded, failed or cancelled.
             */
            status: string;
            /** Metadata */
            metadata: {
                [key: string]: string;
            } | null;
            /** Cloned From */
            cloned_from: string | null;
            /** Stages */
            stages: components["schemas"]["StageOut"][];
        };
        /**
         * PreviewAnswerOut
         * @description An answer and its grade.
         */
        PreviewAnswerOut: {
            /** Id */
            id: string;
            /**
             * Line
             * @description Line of the training file.
             */
            line: number;
            /**
             * Member
             * @description Index of the answer among those of its row.
             */
            member: number;
            /** Output Text */
            output_text: string;
            /** Output Reasoning */
            output_reasoning: string | null;
            /**
             * Finish Reason
             * @enum {string}
             */
            finish_reason: "stop" | "length";
            /** Prompt Tokens */
            prompt_tokens: number;
            /** Completion Tokens */
            completion_tokens: number;
            /**
             * Score
             * @description null: could not be graded; see `reason`.
             */
            score: number | null;
            /** Reason */
            reason: string;
            /** Sub Scores */
            sub_scores: {
                [key: string]: number | null;
            } | null;
            /**
             * Output
             * @description Printed by the grader.
             */
            output: string | null;
            /**
             * Item
             * @description The dataset row as graders see it.
             */
            item: {
                [key: string]: unknown;
            };
        };
        /**
         * PreviewErrorOut
         * @description The error that ended a preview, and the status that a response with it would have.
         */
        PreviewErrorOut: {
            /** Message */
            message: string;
            /** Type */
            type: string;
            /** Param */
            param: string | null;
            /** Code */
            code: string | null;
            /** Status */
            status: number;
        };
        /**
         * PreviewOut
         * @description A preview. `request` is the body that created it; values of grader headers are masked.
         */
        PreviewOut: {
            /** Id */
            id: string;
            /**
             * Object
             * @default regraft.preview
             * @constant
             */
            object: "regraft.preview";
            /** Created At */
            created_at: number;
            /** Finished At */
            finished_at: number | null;
            /**
             * Status
             * @description in_progress, completed, failed or canceled.
             */
            status: string;
            /** Request */
            request: {
                [key: string]: unknown;
            };
            /**
             * Answers Of
             * @description The earlier preview whose answers this one grades; null: it sampled its own.
             */
            answers_of: string | null;
            progress: components["schemas"]["PreviewProgressOut"];
            /** @description Once it is completed. */
            report: components["schemas"]["PreviewReportOut"] | null;
            error: components["schemas"]["PreviewErrorOut"] | null;
        };
        /**
         * PreviewProgressOut
         * @description How far a preview is; of all answers, those that are sampled, and those that are graded.
         */
        PreviewProgressOut: {
            /**
             * Phase
             * @enum {string}
             */
            phase: "loading" | "sampling" | "grading";
            /** Of */
            of: number;
            /** Sampled */
            sampled: number;
            /** Graded */
            graded: number;
            /**
             * Waiting For
             * @description The unavailable part, such as the inference server, if the preview waits for one.
             */
            waiting_for?: string | null;
        };
        /**
         * PreviewReportOut
         * @description The job's size and estimate as in /v1/regraft/estimate, with the measured answer lengths, and the results of the
         *     preview. docs/howto/preview.md documents each number.
         */
        PreviewReportOut: {
            /** Model */
            model: string;
            /** Gpu Class */
            gpu_class: string;
            /** Training Rows */
            training_rows: number;
            /** Validation Rows */
            validation_rows: number;
            /** N Epochs */
            n_epochs: number;
            /** Batch Size */
            batch_size: number;
            /** Total Steps */
            total_steps: number;
            /**
             * Estimate
             * @description In the shape of a job's estimate.
             */
            estimate: {
                [key: string]: unknown;
            } | null;
            /**
             * Reason
             * @description Reason for a missing estimate.
             */
            reason: string | null;
            /**
             * Warnings
             * @description Accepted parameters without effect, as in the job's events.
             */
            warnings: string[];
            /** Group Size */
            group_size: number;
            /** Max Completion Tokens */
            max_completion_tokens: number;
            /** Prompts */
            prompts: components["schemas"]["ShownPrompt"][];
            /** Answers */
            answers: number;
            /** Passed */
            passed: number;
            /** Pass Threshold */
            pass_threshold: number;
            /** @description Of the graded answers; null without any. */
            pass_rate: components["schemas"]["ShareEstimate"] | null;
            /** Mean Reward */
            mean_reward: number | null;
            /** Signal */
            signal: components["schemas"]["Signal"][];
            prompt_tokens: components["schemas"]["Spread"];
            completion_tokens: components["schemas"]["Spread"];
            /**
             * Cut Off
             * @description Answers that reached the token limit.
             */
            cut_off: number;
            /**
             * Cut Thoughts
             * @description Of these, within the thought of a reasoning model.
             */
            cut_thoughts: number;
            grading: components["schemas"]["Grading"];
            sampling: components["schemas"]["PreviewSampling"];
            /**
             * Verdict
             * @enum {string}
             */
            verdict: "good" | "little_signal" | "too_hard" | "too_easy" | "uneven" | "cut_off" | "grader_fails" | "does_not_fit";
            /** Recommendation */
            recommendation: string;
        };
        /**
         * PreviewSampling
         * @description Throughput of the inference server, without loading the model.
         */
        PreviewSampling: {
            /** Seconds */
            seconds: number;
            /** Tokens Per Second */
            tokens_per_second: number;
        };
        /**
         * PreviewedOut
         * @description The results of the preview of the same request (docs/howto/preview.md).
         */
        PreviewedOut: {
            /** Id */
            id: string;
            /** Created At */
            created_at: number;
            /** Answers */
            answers: number;
            /** Passed */
            passed: number;
            /** Mean Reward */
            mean_reward: number | null;
            /**
             * Signal
             * @description The expected share of groups with signal at the job's group size.
             */
            signal: number;
            /** Verdict */
            verdict: string;
        };
        /**
         * ProfileOut
         * @description The profile of a file. core/storage/profiles.py documents each number.
         */
        ProfileOut: {
            /**
             * Object
             * @default regraft.file_profile
             * @constant
             */
            object: "regraft.file_profile";
            /** File Id */
            file_id: string;
            /** Model */
            model: string | null;
            /**
             * Method
             * @enum {string}
             */
            method: "reinforcement" | "supervised" | "dpo" | "reward_model";
            /**
             * Rows
             * @description Valid rows.
             */
            rows: number;
            /**
             * Is Whole
             * @description False: only the first million rows were read.
             */
            is_whole: boolean;
            /**
             * Invalid
             * @description Lines with problems, which a job would reject.
             */
            invalid: number;
            /**
             * Problems
             * @description The first 20 different ones.
             */
            problems: components["schemas"]["RowProblem"][];
            /**
             * Foreign Format
             * @description Names the format of a file that no job reads, and says what to do; null: it has none.
             */
            foreign_format?: string | null;
            /** @description Of the text of a prompt. */
            characters: components["schemas"]["Lengths"] | null;
            tokens: components["schemas"]["TokenLengths"] | null;
            /**
             * Tokens Reason
             * @description The reason if tokens are not counted.
             */
            tokens_reason: string | null;
            duplicates: components["schemas"]["Duplicates"];
            overlap: components["schemas"]["Overlap"] | null;
            /** Fields */
            fields: components["schemas"]["ProfiledField"][];
            grader: components["schemas"]["GraderReads"] | null;
        };
        /**
         * ProfiledField
         * @description A key of the rows, which graders read as `item.<name>`.
         */
        ProfiledField: {
            /** Name */
            name: string;
            /** Rows */
            rows: number;
            /** Missing */
            missing: number;
            /** Types */
            types: {
                [key: string]: number;
            };
            /**
             * Distinct
             * @description Different values; null: more than 1000.
             */
            distinct: number | null;
            /**
             * Example
             * @description The first value, at most 120 characters of its JSON.
             */
            example: string;
        };
        /**
         * ProgressOut
         * @description The work of the job's run inside of its step, about a second ago.
         */
        ProgressOut: {
            /**
             * Step
             * @description null: no step has begun. 0: the validation of the model that the job starts from.
             */
            step: number | null;
            /**
             * Phase
             * @enum {string}
             */
            phase: "loading" | "starting the sampler" | "sampling" | "grading" | "training" | "validation" | "saving" | "waiting for the database" | "waiting for the blob store" | "waiting for the disk" | "waiting for the file descriptors" | "waiting for the name server" | "waiting for the main memory" | "waiting for the inference server" | "waiting for the grader's server" | "waiting for the teacher";
            /**
             * Done
             * @description Answers of this phase, or rows of a file; null: none are counted.
             */
            done: number | null;
            /** Of */
            of: number | null;
            /**
             * Since
             * @description Unix time in seconds.
             */
            since: number;
        };
        /** PromptListing */
        PromptListing: {
            /**
             * Object
             * @default list
             * @constant
             */
            object: "list";
            /** Data */
            data: components["schemas"]["PromptOut"][];
            /**
             * Has More
             * @default false
             */
            has_more: boolean;
            /**
             * Steps
             * @description All selected steps with stored samples, ascending.
             */
            steps: number[];
            /**
             * Counted Step
             * @description The step that `outcome`, `last_mean` and `change` are of: that of the delivered checkpoint for validations, else the last one.
             */
            counted_step: number | null;
            /**
             * Pass Threshold
             * @description The mean reward from which a prompt counts as solved.
             */
            pass_threshold: number;
            /**
             * Outcomes
             * @description The number of prompts by outcome, of all prompts.
             */
            outcomes: {
                [key: string]: number;
            };
            /**
             * Stored
             * @description The number of samples behind this list.
             */
            stored: number;
        };
        /**
         * PromptOut
         * @description The rewards of one prompt over the steps.
         */
        PromptOut: {
            /** Id */
            id: string;
            /**
             * Line
             * @description Line of the file.
             */
            line: number;
            /**
             * Text
             * @description The first characters of the last message.
             */
            text: string | null;
            /**
             * Outcome
             * @description By the steps whose mean reward reaches `pass_threshold`. learned: the last one, not the first; kept: both; forgotten: an earlier one, not the last; stuck: none; ungraded: no sample has a score.
             * @enum {string}
             */
            outcome: "learned" | "kept" | "forgotten" | "stuck" | "ungraded";
            /**
             * First Mean
             * @description Mean reward of the first step with a graded sample.
             */
            first_mean: number | null;
            /** Last Mean */
            last_mean: number | null;
            /**
             * Change
             * @description `last_mean` minus `first_mean`.
             */
            change: number | null;
            /**
             * Steps
             * @description Steps with samples of this prompt, ascending.
             */
            steps: number[];
            /**
             * Mean Rewards
             * @description By step; null where no sample has a score.
             */
            mean_rewards: (number | null)[];
            /**
             * Samples
             * @description The number of stored samples by step.
             */
            samples: number[];
        };
        /**
         * QueueOut
         * @description Position of a waiting job in its queue, from 1, and what blocks it.
         */
        QueueOut: {
            /** Position */
            position: number;
            /** Reason */
            reason: string;
        };
        /**
         * RegradeOut
         * @description Stored answers of a job scored by another grader.
         */
        RegradeOut: {
            /** Id */
            id: string;
            /**
             * Object
             * @default regraft.regrade
             * @constant
             */
            object: "regraft.regrade";
            /** Job Id */
            job_id: string;
            /** Name */
            name: string;
            /** Created At */
            created_at: number;
            /** Started At */
            started_at: number | null;
            /** Finished At */
            finished_at: number | null;
            /**
             * Status
             * @description queued, in_progress, completed, failed or canceled.
             */
            status: string;
            /** Error */
            error: {
                [key: string]: unknown;
            } | null;
            /** Grader */
            grader: {
                [key: string]: unknown;
            };
            /**
             * Split
             * @description null: both.
             */
            split: ("train" | "valid") | null;
            /** Step From */
            step_from: number;
            /** Step To */
            step_to: number;
            /** Answers */
            answers: number;
            /**
             * Graded
             * @description Finished answers so far, with or without a score.
             */
            graded: number;
            /**
             * Usage
             * @description Tokens of judges by model.
             */
            usage: {
                [key: string]: unknown;
            }[];
            /** Budget */
            budget: {
                [key: string]: number;
            } | null;
            /** Pass Threshold */
            pass_threshold: number;
            /** @description Once it is completed. */
            comparison: components["schemas"]["ComparedScores"] | null;
        };
        /**
         * RegradedOut
         * @description An answer with both scores. `id` is that of the rollout.
         */
        RegradedOut: {
            /** Id */
            id: string;
            /** Step */
            step: number;
            /**
             * Split
             * @enum {string}
             */
            split: "train" | "valid";
            /** Group */
            group: number;
            /** Line */
            line: number;
            /** Output Text */
            output_text: string;
            /** Before */
            before: number | null;
            /** After */
            after: number | null;
            /** Changes */
            changes: ("flipped" | "higher" | "lower" | "same" | "gained" | "lost")[];
            /** Reason */
            reason: string | null;
            /** Error */
            error: string | null;
            /**
             * Output
             * @description Printed by the new grader.
             */
            output: string | null;
        };
        /**
         * ResultOut
         * @description The validation of the delivered checkpoint. Lists, pages and commands show these numbers as the job's result.
         */
        ResultOut: {
            /**
             * Step
             * @description Of the delivered checkpoint.
             */
            step: number;
            /**
             * Metric
             * @enum {string}
             */
            metric: "full_valid_mean_reward" | "full_valid_loss";
            /**
             * Start
             * @description Of the model that the job started from; null: it was not validated.
             */
            start: number | null;
            /** Value */
            value: number;
        };
        /**
         * RewardsOut
         * @description The rewards of one formula.
         */
        RewardsOut: {
            /** Graded */
            graded: number;
            /** Mean */
            mean: number | null;
            /**
             * Passed
             * @description Answers with a score of at least `pass_threshold`.
             */
            passed: number;
            /**
             * Groups With Signal
             * @description Groups with answers of different scores.
             */
            groups_with_signal: number;
        };
        /** RolloutListing */
        RolloutListing: {
            /**
             * Object
             * @default list
             * @constant
             */
            object: "list";
            /** Data */
            data: {
                /** Id */
                id: string;
                /** Step */
                step: number;
                /**
                 * Split
                 * @enum {string}
                 */
                split: "train" | "valid";
                /**
                 * Group
                 * @description Index of the prompt in the step, from 0.
                 */
                group: number;
                /**
                 * Member
                 * @description Index of the answer in its group.
                 */
                member: number;
                /**
                 * Line
                 * @description Line of the file.
                 */
                line: number;
                /** Messages */
                messages: {
                    [key: string]: unknown;
                }[];
                /**
                 * Item
                 * @description The other fields of the dataset row.
                 */
                item: {
                    [key: string]: unknown;
                } | null;
                /**
                 * Output Text
                 * @description The final answer.
                 */
                output_text: string;
                /**
                 * Output Reasoning
                 * @description The thought of a reasoning model.
                 */
                output_reasoning: string | null;
                /** Finish Reason */
                finish_reason: string;
                /**
                 * Prompt Tokens
                 * @description null: written by a version that did not count them.
                 */
                prompt_tokens: number | null;
                /** Completion Tokens */
                completion_tokens: number;
                /**
                 * Reasoning Tokens
                 * @description Of the completion tokens; null: written by a version that did not count them.
                 */
                reasoning_tokens: number | null;
                /**
                 * Grammar Start
                 * @description Index of the first token of the final answer.
                 */
                grammar_start: number | null;
                /**
                 * Policy Step
                 * @description Steps that the policy had learned from when it sampled the answer.
                 */
                policy_step: number | null;
                /**
                 * Score
                 * @description null: could not be graded; see `reason`.
                 */
                score: number | null;
                /** Reason */
                reason: string | null;
                /**
                 * Error
                 * @description Kind of the grading error.
                 */
                error: string | null;
                /**
                 * Output
                 * @description Printed by a python grader.
                 */
                output: string | null;
                /** Sub Scores */
                sub_scores: {
                    [key: string]: number | null;
                } | null;
                /** Sub Reasons */
                sub_reasons: {
                    [key: string]: string;
                } | null;
                /** Sub Errors */
                sub_errors: {
                    [key: string]: string;
                } | null;
                /** Sub Outputs */
                sub_outputs: {
                    [key: string]: string;
                } | null;
                /**
                 * Centered Reward
                 * @description The score minus the mean of its group.
                 */
                centered_reward: number | null;
                /**
                 * Advantage
                 * @description As used in training; null: the answer was not trained on.
                 */
                advantage: number | null;
                /** Trained */
                trained: boolean | null;
                /**
                 * Replacement
                 * @description Resampled in place of a prompt without signal.
                 */
                replacement: boolean | null;
                /**
                 * Has Tokens
                 * @description Whether the values of its tokens are stored.
                 */
                has_tokens: boolean | null;
                /**
                 * Steps
                 * @description Of an answer that was judged by steps.
                 */
                steps: components["schemas"]["RolloutStepOut"][] | null;
            }[];
            /**
             * Has More
             * @default false
             */
            has_more: boolean;
            /** Total */
            total: number;
            /** Stored */
            stored: number;
        };
        /**
         * RolloutStepOut
         * @description A step of an answer that was judged by steps.
         */
        RolloutStepOut: {
            /**
             * End
             * @description Index of the character after the step.
             */
            end: number;
            /** Score */
            score: number | null;
            /** Advantage */
            advantage: number | null;
        };
        /**
         * RolloutTokens
         * @description The values of each token of a sample, its thought and stop token included, with three decimal digits.
         */
        RolloutTokens: {
            /**
             * Object
             * @default regraft.rollout_tokens
             * @constant
             */
            object: "regraft.rollout_tokens";
            /** Rollout Id */
            rollout_id: string;
            /** Tokens */
            tokens: components["schemas"]["TokenOut"][];
        };
        /**
         * RowDoubt
         * @description A reason why the grader cannot tell the answers to some rows apart, as the end of a sentence "This row ...".
         */
        RowDoubt: {
            /** Message */
            message: string;
            found: components["schemas"]["SomeLines"];
        };
        /**
         * RowProblem
         * @description A problem of a row, and the number of other lines that have it.
         */
        RowProblem: {
            /**
             * Line
             * @description The first one.
             */
            line: number;
            /** Path */
            path: string;
            /** Message */
            message: string;
            /**
             * More Lines
             * @description Further lines with the same problem.
             */
            more_lines: number;
        };
        /** Scores */
        Scores: {
            /**
             * Graders
             * @default []
             */
            graders: {
                [key: string]: unknown;
            }[];
            /** Train Reward Mean */
            train_reward_mean?: number | null;
            /** Valid Reward Mean */
            valid_reward_mean?: number | null;
        };
        /** SessionOut */
        SessionOut: {
            /**
             * Object
             * @default regraft.session
             * @constant
             */
            object: "regraft.session";
            /** Key Id */
            key_id: string;
            /** Key Name */
            key_name: string;
            /** User */
            user: string | null;
            /** Scope */
            scope: string;
            /** Project Id */
            project_id: string;
            /** Project Name */
            project_name: string;
            /** Expires At */
            expires_at: number | null;
        };
        /**
         * ShareEstimate
         * @description A share from 0 to 1 with its 95 % confidence interval.
         */
        ShareEstimate: {
            /** Low */
            low: number;
            /** Expected */
            expected: number;
            /** High */
            high: number;
        };
        /**
         * ShownPrompt
         * @description A row in the report: the rewards (null: not graded), and the first answer, cut at 500 characters.
         */
        ShownPrompt: {
            /** Line */
            line: number;
            /** Tokens */
            tokens: number;
            /** Rewards */
            rewards: (number | null)[];
            /** Answer */
            answer: string;
        };
        /**
         * Signal
         * @description The share of groups of one size whose rewards would not all be equal.
         *
         *     `at_least`: the group size exceeds the number of samples, so the share is that of the largest possible groups.
         */
        Signal: {
            /** Group Size */
            group_size: number;
            share: components["schemas"]["ShareEstimate"];
            /** At Least */
            at_least: boolean;
        };
        /**
         * SomeLines
         * @description A number of rows, and the first lines of them.
         */
        SomeLines: {
            /** Rows */
            rows: number;
            /** Lines */
            lines: number[];
        };
        /**
         * Spread
         * @description A distribution, such as of tokens or seconds.
         */
        Spread: {
            /** Mean */
            mean: number;
            /** P90 */
            p90: number;
            /** Max */
            max: number;
        };
        /**
         * StageErrorOut
         * @description The error that ended a stage.
         */
        StageErrorOut: {
            /** Code */
            code: string;
            /** Message */
            message: string;
        };
        /**
         * StageOut
         * @description A stage. Its results are `model` or `file`, once it has succeeded.
         */
        StageOut: {
            /** Name */
            name: string;
            /**
             * Kind
             * @description job, sample, select or mix.
             */
            kind: string;
            /**
             * Status
             * @description waiting, running, succeeded, failed or cancelled.
             */
            status: string;
            /**
             * Needs
             * @description The stages that must succeed before this one starts.
             */
            needs: string[];
            /**
             * Spec
             * @description The request, without secrets; null in lists.
             */
            spec: {
                [key: string]: unknown;
            } | null;
            /** Job Id */
            job_id?: string | null;
            /** Job Status */
            job_status?: string | null;
            /** Eval Id */
            eval_id?: string | null;
            /** Run Id */
            run_id?: string | null;
            /**
             * Progress
             * @description Of a sample stage: finished, total.
             */
            progress?: {
                [key: string]: number;
            } | null;
            /** Model */
            model?: string | null;
            /** File */
            file?: string | null;
            /**
             * Rows
             * @description Of the file.
             */
            rows?: number | null;
            error?: components["schemas"]["StageErrorOut"] | null;
            /**
             * Note
             * @description The reason why the stage cannot start yet.
             */
            note?: string | null;
            /** Started At */
            started_at?: number | null;
            /** Finished At */
            finished_at?: number | null;
            /**
             * Reused From
             * @description The pipeline that made the result of a clone.
             */
            reused_from?: string | null;
            /**
             * Earlier
             * @description The jobs of failed attempts.
             * @default []
             */
            earlier: string[];
        };
        /**
         * StepMetrics
         * @description The metrics of one step. A metric that the step did not measure is None here, and absent or null in its event.
         */
        StepMetrics: {
            /**
             * Step
             * @description Number of the step. Step 0 is the validation of the base model.
             */
            step: number;
            /**
             * Total Steps
             * @description Number of steps of the job.
             * @default 0
             */
            total_steps: number;
            /**
             * Gpus
             * @description GPUs of the run, if more than one.
             */
            gpus?: number | null;
            /**
             * Train Loss
             * @description Supervised: mean -log p of the learned tokens. dpo and reward_model: mean loss of the pairs or of the scored answers. Before the update.
             */
            train_loss?: number | null;
            /**
             * Train Accuracy
             * @description The accuracy of the next two, by OpenAI's second name.
             */
            train_accuracy?: number | null;
            /**
             * Valid Loss
             * @description The same loss on a part of the validation file.
             */
            valid_loss?: number | null;
            /**
             * Valid Mean Token Accuracy
             * @description The token accuracy there.
             */
            valid_mean_token_accuracy?: number | null;
            /**
             * Full Valid Loss
             * @description The loss on the whole validation file.
             */
            full_valid_loss?: number | null;
            /**
             * Full Valid Mean Token Accuracy
             * @description The token accuracy there.
             */
            full_valid_mean_token_accuracy?: number | null;
            /**
             * Train Mean Token Accuracy
             * @description Supervised: share of the learned tokens that the model thinks likeliest.
             */
            train_mean_token_accuracy?: number | null;
            /**
             * Train Mean Reward Accuracy
             * @description dpo and reward_model: share of the pairs in which the preferred answer has the higher reward. That of dpo is beta times the log-probability ratio to the reference.
             */
            train_mean_reward_accuracy?: number | null;
            /**
             * Train Mean Reward Margin
             * @description dpo and reward_model: reward of the preferred less the other answer.
             */
            train_mean_reward_margin?: number | null;
            /**
             * Train Mean Chosen Reward
             * @description dpo and reward_model: reward of the preferred answers.
             */
            train_mean_chosen_reward?: number | null;
            /**
             * Train Mean Rejected Reward
             * @description dpo and reward_model: reward of the other answers.
             */
            train_mean_rejected_reward?: number | null;
            /**
             * Valid Mean Reward Accuracy
             * @description On a part of the validation file.
             */
            valid_mean_reward_accuracy?: number | null;
            /**
             * Valid Mean Reward Margin
             * @description On a part of the validation file.
             */
            valid_mean_reward_margin?: number | null;
            /**
             * Full Valid Mean Reward Accuracy
             * @description On the whole validation file.
             */
            full_valid_mean_reward_accuracy?: number | null;
            /**
             * Full Valid Mean Reward Margin
             * @description On the whole validation file.
             */
            full_valid_mean_reward_margin?: number | null;
            /**
             * Full Valid Mean Chosen Reward
             * @description On the whole validation file.
             */
            full_valid_mean_chosen_reward?: number | null;
            /**
             * Full Valid Mean Rejected Reward
             * @description On the whole validation file.
             */
            full_valid_mean_rejected_reward?: number | null;
            /**
             * Train Mean Reward
             * @description Mean reward of the graded answers.
             */
            train_mean_reward?: number | null;
            /**
             * Train Reward Mean
             * @description The same, by OpenAI's second name.
             */
            train_reward_mean?: number | null;
            /**
             * Train Reward Std
             * @description Standard deviation of the rewards over all answers.
             */
            train_reward_std?: number | null;
            /**
             * Full Valid Mean Reward
             * @description Mean reward of the graded validation answers.
             */
            full_valid_mean_reward?: number | null;
            /**
             * Valid Reward Mean
             * @description The same, by OpenAI's second name.
             */
            valid_reward_mean?: number | null;
            /**
             * Full Valid Stderr
             * @description Standard error of the validation reward over rows.
             */
            full_valid_stderr?: number | null;
            /**
             * Full Valid Difference
             * @description Validation reward less the base model's, paired by row.
             */
            full_valid_difference?: number | null;
            /**
             * Full Valid Difference Low
             * @description Lower end of its 95 % interval.
             */
            full_valid_difference_low?: number | null;
            /**
             * Full Valid Difference High
             * @description Upper end of its 95 % interval.
             */
            full_valid_difference_high?: number | null;
            /**
             * Full Valid Pass At 1
             * @description With `eval_samples` above 1: share of the validation answers whose score is at least `pass_score`.
             */
            full_valid_pass_at_1?: number | null;
            /**
             * Full Valid Pass At K
             * @description Then, too: share of the rows in which at least one of the k = `eval_samples` answers passes.
             */
            full_valid_pass_at_k?: number | null;
            /**
             * Full Valid Maj At K
             * @description Then, too: share of the rows in which the commonest of the k final answers passes.
             */
            full_valid_maj_at_k?: number | null;
            /**
             * Full Valid Mean Parse Error
             * @description Share of the validation answers that could not be parsed.
             */
            full_valid_mean_parse_error?: number | null;
            /**
             * Full Valid Teacher Kl
             * @description distillation: reverse KL to the teacher per token of the validation answers, estimated from what was sampled.
             */
            full_valid_teacher_kl?: number | null;
            /**
             * Valid Completion Tokens Mean
             * @description Mean length of the validation answers.
             */
            valid_completion_tokens_mean?: number | null;
            /**
             * Valid Truncated Share
             * @description Share of the validation answers that reached the token limit.
             */
            valid_truncated_share?: number | null;
            /**
             * Valid Unresponsive Rewards
             * @description Share of the validation answers that could not be graded.
             */
            valid_unresponsive_rewards?: number | null;
            /**
             * Completion Tokens Mean
             * @description Mean length of the answers.
             */
            completion_tokens_mean?: number | null;
            /**
             * Completion Tokens Max
             * @description Length of the longest answer.
             */
            completion_tokens_max?: number | null;
            /**
             * Mean Unresponsive Rewards
             * @description Share of the answers that could not be graded.
             */
            mean_unresponsive_rewards?: number | null;
            /**
             * Truncated Share
             * @description Share of the answers that reached the token limit.
             */
            truncated_share?: number | null;
            /**
             * Reasoning Tokens Mean
             * @description Mean length of the thoughts, of a reasoning model.
             */
            reasoning_tokens_mean?: number | null;
            /**
             * Answer Tokens Mean
             * @description Mean length of the final answers, of a reasoning model.
             */
            answer_tokens_mean?: number | null;
            /**
             * Cut Thoughts Share
             * @description Share of the answers that ended within their thought.
             */
            cut_thoughts_share?: number | null;
            /**
             * Groups Mixed Share
             * @description Share of the groups with signal: their rewards differ.
             */
            groups_mixed_share?: number | null;
            /**
             * Groups All Zero Share
             * @description Share of the groups in which all rewards are 0.
             */
            groups_all_zero_share?: number | null;
            /**
             * Groups All One Share
             * @description Share of the groups in which all rewards are 1.
             */
            groups_all_one_share?: number | null;
            /**
             * Groups Equal Share
             * @description Share of the groups in which all rewards are another equal number.
             */
            groups_equal_share?: number | null;
            /**
             * Groups Ungraded Share
             * @description Share of the groups with fewer than two graded answers.
             */
            groups_ungraded_share?: number | null;
            /**
             * Loss
             * @description Loss of the update, mean over the trained tokens.
             */
            loss?: number | null;
            /**
             * Kl
             * @description KL divergence to the reference per token (k3), on one pack a step unless `kl` is set.
             */
            kl?: number | null;
            /**
             * Kl Weight
             * @description Weight of the KL penalty in the step: `kl.weight`, or less during `kl.warmup_steps`.
             */
            kl_weight?: number | null;
            /**
             * Teacher Kl
             * @description distillation: reverse KL to the teacher per sampled token, mean of log p_student - log p_teacher before the update.
             */
            teacher_kl?: number | null;
            /**
             * Entropy
             * @description Mean entropy of the policy per trained token.
             */
            entropy?: number | null;
            /**
             * Sampling Entropy
             * @description Mean of -log p over all sampled tokens, groups without signal included.
             */
            sampling_entropy?: number | null;
            /**
             * Clip Fraction
             * @description Share of the trained tokens whose ratio was clipped.
             */
            clip_fraction?: number | null;
            /**
             * Value Loss
             * @description Loss ppo: mean loss of the value head per trained token.
             */
            value_loss?: number | null;
            /**
             * Explained Variance
             * @description Loss ppo: share of the variance of the returns that the values of the step explain, before its update. 1 at best, 0 for a constant, negative if they are worse than one.
             */
            explained_variance?: number | null;
            /**
             * Grad Norm
             * @description Norm of the gradient before clipping.
             */
            grad_norm?: number | null;
            /**
             * Logprob Gap
             * @description Mean |log p of the sampler - log p of the trainer| per token.
             */
            logprob_gap?: number | null;
            /**
             * Logprob Gap Max
             * @description The largest such difference.
             */
            logprob_gap_max?: number | null;
            /**
             * Logprob Gap K1
             * @description KL(sampler || trainer) by the estimator k1.
             */
            logprob_gap_k1?: number | null;
            /**
             * Logprob Gap K3
             * @description KL(sampler || trainer) by the estimator k3.
             */
            logprob_gap_k3?: number | null;
            /**
             * Logprob Gap Ess
             * @description Effective share of the sample under the weights pi_trainer / pi_sampler.
             */
            logprob_gap_ess?: number | null;
            /**
             * Staleness
             * @description With the schedule `off_policy`: mean number of updates between the policy that sampled a token and the one that learns from it.
             */
            staleness?: number | null;
            /**
             * Stale Tokens Share
             * @description With `continue_in_flight`: share of the sampled tokens that the policy before the newest update sampled.
             */
            stale_tokens_share?: number | null;
            /**
             * Skipped Updates
             * @description 1 if a gradient was not finite and the step was not taken, else 0.
             */
            skipped_updates?: number | null;
            /**
             * Trained Sequences
             * @description Answers that were trained on.
             */
            trained_sequences?: number | null;
            /**
             * Trained Tokens
             * @description Tokens that were trained on, once for each update.
             */
            trained_tokens?: number | null;
            /**
             * Dropped Sequences
             * @description Answers without signal, which were not computed.
             */
            dropped_sequences?: number | null;
            /**
             * Resampled Prompts
             * @description Prompts sampled in addition, for groups without signal.
             */
            resampled_prompts?: number | null;
            /**
             * Resampled Mixed Share
             * @description Share of the groups with signal among these prompts.
             */
            resampled_mixed_share?: number | null;
            /**
             * Discarded Groups
             * @description Groups without signal, if prompts were resampled.
             */
            discarded_groups?: number | null;
            /**
             * Discarded Tokens
             * @description Tokens of those groups.
             */
            discarded_tokens?: number | null;
            /**
             * Discarded Seconds
             * @description Their part of the sampling time, by tokens.
             */
            discarded_seconds?: number | null;
            /**
             * Sampled Tokens
             * @description Tokens of all answers of the step.
             */
            sampled_tokens?: number | null;
            /**
             * Sampling Tokens Per Second
             * @description Sampled tokens per second of the phase sampling, or of `ahead_seconds`.
             */
            sampling_tokens_per_second?: number | null;
            /**
             * Ahead Seconds
             * @description With the schedule `off_policy`: seconds in which the answers were sampled during earlier steps. The phase sampling is the part of it that the trainer waited for.
             */
            ahead_seconds?: number | null;
            /**
             * Training Tokens Per Second
             * @description Trained tokens per second of the phase training.
             */
            training_tokens_per_second?: number | null;
            /**
             * @description Mean reward by split and grader.
             * @default {
             *       "graders": []
             *     }
             */
            scores: components["schemas"]["Scores"];
            /**
             * @description Number and share of the grades that failed, by category, split and grader.
             * @default {
             *       "graders": []
             *     }
             */
            errors: components["schemas"]["ByGrader"];
            /**
             * @description Seconds by phase of the step, and mean seconds per grade by split and grader.
             * @default {
             *       "graders": [],
             *       "step": {
             *         "eval": 0,
             *         "full_iteration": 0,
             *         "grading": 0,
             *         "sampling": 0,
             *         "training": 0,
             *         "waiting": 0
             *       }
             *     }
             */
            timing: components["schemas"]["Timing"];
            /**
             * Model Graders Token Usage
             * @description Tokens read and written by judge models, by model.
             * @default {}
             */
            model_graders_token_usage: {
                [key: string]: {
                    [key: string]: number;
                };
            };
            /**
             * @description Tokens read and written by judge models, by grader.
             * @default {
             *       "graders": []
             *     }
             */
            usage: components["schemas"]["ByGrader"];
        } & {
            [key: string]: unknown;
        };
        /**
         * StoredGraderOut
         * @description A named grader with its current version.
         */
        StoredGraderOut: {
            /** Id */
            id: string;
            /**
             * Object
             * @default regraft.grader
             * @constant
             */
            object: "regraft.grader";
            /** Name */
            name: string;
            /** Created At */
            created_at: number;
            /** Updated At */
            updated_at: number;
            /**
             * Version
             * @description SHA-256 of the specification.
             */
            version: string;
            /** Versions */
            versions: number;
            /**
             * Cases
             * @description Golden cases.
             */
            cases: number;
            /**
             * Grader
             * @description The specification; header values are masked.
             */
            grader: {
                [key: string]: unknown;
            };
        };
        /**
         * TaskOut
         * @description A job or an eval run that a worker works on.
         */
        TaskOut: {
            /**
             * Kind
             * @enum {string}
             */
            kind: "run" | "validation" | "eval_run";
            /** Id */
            id: string;
            /** Project Id */
            project_id: string;
            /** Model */
            model: string | null;
            /**
             * Progress
             * @description Of a run, as the job has it; null: not known.
             */
            progress: {
                [key: string]: unknown;
            } | null;
        };
        /**
         * TemplateFacts
         * @description The behavior of a chat template.
         */
        TemplateFacts: {
            /** End Of Turn */
            end_of_turn: string | null;
            /** End Of Turn Added */
            end_of_turn_added: boolean;
            /** Generation Prompt */
            generation_prompt: boolean;
            /** Question */
            question: boolean;
            /** Question End */
            question_end: boolean;
            /** Answer */
            answer: boolean;
            /**
             * System Role
             * @enum {string}
             */
            system_role: "rendered" | "ignored" | "rejected";
            /** Alternation */
            alternation: boolean;
            /** Tools */
            tools: boolean;
            /** Thoughts */
            thoughts: boolean;
            /** Date */
            date: boolean;
        };
        /** Timing */
        Timing: {
            /**
             * Graders
             * @default []
             */
            graders: {
                [key: string]: unknown;
            }[];
            /**
             * @default {
             *       "sampling": 0,
             *       "grading": 0,
             *       "training": 0,
             *       "eval": 0,
             *       "waiting": 0,
             *       "full_iteration": 0
             *     }
             */
            step: components["schemas"]["PhaseSeconds"];
        };
        /**
         * TokenLengths
         * @description Tokens as the chat template of the model renders a row: of its prompt, or with its answers for other methods.
         *
         *     `rows` is smaller than the rows of the file if it has more than 50,000: then a uniform sample is counted.
         */
        TokenLengths: {
            /** Rows */
            rows: number;
            /** Mean */
            mean: number;
            /** Min */
            min: number;
            /** P50 */
            p50: number;
            /** P90 */
            p90: number;
            /** P99 */
            p99: number;
            /** Max */
            max: number;
            /** Bins */
            bins: components["schemas"]["LengthBin"][];
            /**
             * Room
             * @description The most that a row may have.
             */
            room: number;
            /** @description Of the counted rows: those with more tokens than `room`. */
            too_long: components["schemas"]["SomeLines"];
            /** @description Of the counted rows: those that the chat template rejects. */
            not_rendered: components["schemas"]["SomeLines"];
            /** @description Of the counted rows: those whose content has the text of a special token, which is read and learned as text. */
            special_texts: components["schemas"]["SomeLines"];
        };
        /**
         * TokenOut
         * @description The values of a token, with three decimal digits.
         */
        TokenOut: {
            /**
             * Text
             * @description Empty for all but the last token of a character.
             */
            text: string;
            /**
             * Logprob
             * @description Of the sampler; null if the token was not sampled.
             */
            logprob: number | null;
            /**
             * Advantage
             * @description As used in training; null if it was not trained on.
             */
            advantage: number | null;
            /**
             * Gap
             * @description Log-probability of the trainer less that of the sampler; null if not computed.
             */
            gap: number | null;
        };
        /**
         * UsageOut
         * @description Current usage by the name of the limit.
         */
        UsageOut: {
            /**
             * Object
             * @default organization.project.usage
             * @constant
             */
            object: "organization.project.usage";
            /** Running Jobs */
            running_jobs: number;
            /** Queued Jobs */
            queued_jobs: number;
            /** Running Eval Runs */
            running_eval_runs: number;
            /** Queued Eval Runs */
            queued_eval_runs: number;
            /** Storage Bytes */
            storage_bytes: number;
            /** Gpu Seconds Per 30 Days */
            gpu_seconds_per_30_days: number;
            /** Grader Tokens Per 30 Days */
            grader_tokens_per_30_days: number;
        };
        /**
         * UsageReport
         * @description Sums of usage by day, model or project.
         */
        UsageReport: {
            /**
             * Object
             * @default regraft.usage
             * @constant
             */
            object: "regraft.usage";
            /** First Day */
            first_day: string;
            /** Last Day */
            last_day: string;
            /** By */
            by: string[];
            /** Data */
            data: components["schemas"]["UsageRowOut"][];
        };
        /**
         * UsageRowOut
         * @description The sums of a group; a field that is not grouped by is null.
         */
        UsageRowOut: {
            /**
             * Day
             * @description In UTC, as 2026-11-25.
             */
            day: string | null;
            /**
             * Model
             * @description null also: recorded by a version that kept no model.
             */
            model: string | null;
            /** Project Id */
            project_id: string | null;
            /** Project Name */
            project_name: string | null;
            /**
             * Gpu Seconds
             * @description Of training, steps that were repeated included.
             */
            gpu_seconds: number;
            /** Sampled Tokens */
            sampled_tokens: number;
            /** Trained Tokens */
            trained_tokens: number;
            /**
             * Grader Tokens
             * @description Those that the limit grader_tokens_per_30_days counts.
             */
            grader_tokens: number;
            /** @description Of the GPU-seconds at today's price; null: no price. */
            cost: components["schemas"]["Money"] | null;
        };
        /**
         * VerdictOut
         * @description The delivered model against the start of the job on the validation rows (docs/howto/training.md, Verdict).
         */
        VerdictOut: {
            /**
             * Outcome
             * @enum {string}
             */
            outcome: "improved" | "no_difference" | "worse" | "too_few";
            /** Base Reward */
            base_reward: number;
            /** Tuned Reward */
            tuned_reward: number;
            /** Difference */
            difference: number;
            /**
             * Ci Low
             * @description Lower end of the 95 % interval of the difference; null: too few rows.
             */
            ci_low: number | null;
            /**
             * Ci High
             * @description Upper end.
             */
            ci_high: number | null;
            /** Wins */
            wins: number;
            /** Losses */
            losses: number;
            /** Ties */
            ties: number;
            /** Rows */
            rows: number;
            /**
             * Ungraded
             * @description Rows that are left out because one of the two has no graded answer.
             */
            ungraded: number;
            /**
             * Step
             * @description Of the delivered checkpoint.
             */
            step: number;
            /**
             * Ground
             * @description The damage that makes it worse; null: decided by the interval alone.
             */
            ground?: string | null;
            /**
             * Start
             * @description The tuned model that the job trained further; null: the base model.
             */
            start?: string | null;
            /**
             * Held Out
             * @description False: the validation file is the training file.
             * @default true
             */
            held_out: boolean;
        };
        /**
         * WebhookDeliveryOut
         * @description An event for one endpoint. `id` is the webhook-id, the same in each attempt.
         */
        WebhookDeliveryOut: {
            /** Id */
            id: string;
            /**
             * Object
             * @default webhook_endpoint.delivery
             * @constant
             */
            object: "webhook_endpoint.delivery";
            /** Type */
            type: string;
            /** Created At */
            created_at: number;
            /**
             * State
             * @description failed: given up.
             * @enum {string}
             */
            state: "pending" | "delivered" | "failed";
            /** Attempts */
            attempts: number;
            /**
             * Next Attempt At
             * @description Unix time, while it is pending.
             */
            next_attempt_at: number | null;
            /** Delivered At */
            delivered_at: number | null;
            /**
             * Last Status
             * @description HTTP status of the last attempt.
             */
            last_status: number | null;
            /** Last Error */
            last_error: string | null;
            /** Event */
            event: {
                [key: string]: unknown;
            };
        };
        /** WebhookEndpointOut */
        WebhookEndpointOut: {
            /** Id */
            id: string;
            /**
             * Object
             * @default webhook_endpoint
             * @constant
             */
            object: "webhook_endpoint";
            /** Created At */
            created_at: number;
            /** Updated At */
            updated_at: number;
            /** Name */
            name: string;
            /** Url */
            url: string;
            /** Event Types */
            event_types: string[];
            /** Thresholds */
            thresholds: {
                [key: string]: number;
            } | null;
            /** Signing Secret Hint */
            signing_secret_hint: string;
        };
        /** WebhookEndpointTestOut */
        WebhookEndpointTestOut: {
            /**
             * Object
             * @default webhook_endpoint.test
             * @constant
             */
            object: "webhook_endpoint.test";
            /** Webhook Endpoint Id */
            webhook_endpoint_id: string;
            /** Event Type */
            event_type: string;
            /** Status Code */
            status_code: number;
            /**
             * Success
             * @default true
             * @constant
             */
            success: true;
        };
        /** WebhookEndpointWithSecret */
        WebhookEndpointWithSecret: {
            /** Id */
            id: string;
            /**
             * Object
             * @default webhook_endpoint
             * @constant
             */
            object: "webhook_endpoint";
            /** Created At */
            created_at: number;
            /** Updated At */
            updated_at: number;
            /** Name */
            name: string;
            /** Url */
            url: string;
            /** Event Types */
            event_types: string[];
            /** Thresholds */
            thresholds: {
                [key: string]: number;
            } | null;
            /** Signing Secret Hint */
            signing_secret_hint: string;
            /** Signing Secret */
            signing_secret: string;
        };
        /**
         * WhatIfOut
         * @description Another formula over the stored scores of a multi grader's parts. The job and its scores do not change.
         */
        WhatIfOut: {
            /** Answers */
            answers: number;
            /**
             * Groups
             * @description Groups with at least two answers.
             */
            groups: number;
            before: components["schemas"]["RewardsOut"];
            after: components["schemas"]["RewardsOut"];
            /** Higher */
            higher: number;
            /** Lower */
            lower: number;
            /** Same */
            same: number;
            /**
             * Gained
             * @description Answers that have a score only in the new ones.
             */
            gained: number;
            /**
             * Lost
             * @description Answers that have none in the new ones.
             */
            lost: number;
            /** Now Passed */
            now_passed: number;
            /** Now Failed */
            now_failed: number;
            /**
             * Changed Signs
             * @description Answers whose reward, minus the mean of their group, has the opposite sign.
             */
            changed_signs: number;
            /**
             * Rank Correlation
             * @description Spearman's, of the stored and the new scores.
             */
            rank_correlation: number | null;
            /**
             * Object
             * @default regraft.what_if
             * @constant
             */
            object: "regraft.what_if";
            /** Formula */
            formula: string;
            /** Pass Threshold */
            pass_threshold: number;
            /**
             * Advantage Scale
             * @enum {string}
             */
            advantage_scale: "none" | "group" | "batch";
            advantages_before: components["schemas"]["AdvantageSizesOut"];
            advantages_after: components["schemas"]["AdvantageSizesOut"];
        };
        /**
         * WorkQueueOut
         * @description A queue of the service.
         */
        WorkQueueOut: {
            /**
             * Object
             * @default regraft.queue
             * @constant
             */
            object: "regraft.queue";
            /**
             * Kind
             * @enum {string}
             */
            kind: "jobs" | "validations" | "eval_runs";
            /**
             * Gpu Class
             * @description null: workers of every class take from it.
             */
            gpu_class: string | null;
            /**
             * Length
             * @description Jobs or runs that a free worker would start.
             */
            length: number;
            /**
             * Oldest Seconds
             * @description Waiting time of the longest-waiting of these.
             */
            oldest_seconds: number;
            /**
             * Held Back
             * @description Whose project runs as many as it may.
             */
            held_back: number;
            /**
             * Backing Off
             * @description After an interruption.
             */
            backing_off: number;
            /** Running */
            running: number;
            /**
             * Workers
             * @description That take from it and are not silent.
             */
            workers: number;
            /**
             * Reason
             * @description What they wait for; null: nothing waits.
             */
            reason: string | null;
        };
        /**
         * WorkerOut
         * @description A worker of the service, as it last reported itself.
         */
        WorkerOut: {
            /**
             * Object
             * @default regraft.worker
             * @constant
             */
            object: "regraft.worker";
            /**
             * Name
             * @description Host and process id, as attempts have it.
             */
            name: string;
            /** Host */
            host: string;
            /** Gpu Class */
            gpu_class: string;
            /** Version */
            version: string;
            /**
             * Machines
             * @description That share its runs, this one included.
             */
            machines: number;
            /**
             * Ranks
             * @description Processes of a run on each of these machines.
             */
            ranks: number;
            /**
             * Status
             * @description `busy`: it runs a job. `silent`: three reports are missing.
             * @enum {string}
             */
            status: "idle" | "busy" | "draining" | "silent";
            /** Started At */
            started_at: number;
            /** Last Seen At */
            last_seen_at: number;
            /**
             * Silent Seconds
             * @description Since the last report, by the database's clock.
             */
            silent_seconds: number;
            /** Gpus */
            gpus: components["schemas"]["GpuOut"][];
            /**
             * Memory Used Bytes
             * @description Of the host, or of the container.
             */
            memory_used_bytes: number | null;
            /** Memory Total Bytes */
            memory_total_bytes: number | null;
            /**
             * Findings
             * @description Of `regraft-server doctor`. Empty: it has not run on this machine with this data folder.
             */
            findings: components["schemas"]["FindingOut"][];
            /** Tasks */
            tasks: components["schemas"]["TaskOut"][];
        };
    };
    responses: never;
    parameters: never;
    requestBodies: never;
    headers: never;
    pathItems: never;
}
export type $defs = Record<string, never>;
export type operations = Record<string, never>;
