"""All tables of version 0.1.0."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

# SQLite autoincrements only a column declared INTEGER.
SEQ = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.create_table(
        "audit_entries",
        sa.Column("seq", SEQ, autoincrement=True, nullable=False),
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("organization_id", sa.String(length=64), nullable=True),
        sa.Column("project_id", sa.String(length=64), nullable=True),
        sa.Column("actor", sa.String(length=64), nullable=False),
        sa.Column("action", sa.String(length=64), nullable=False),
        sa.Column("target", sa.String(length=512), nullable=False),
        sa.Column("request_id", sa.String(length=64), nullable=True),
        sa.Column("data", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("seq", name="pk_audit_entries"),
        sa.UniqueConstraint("id", name="uq_audit_entries_id"),
    )
    op.create_index("ix_audit_entries_project_id_seq", "audit_entries", ["project_id", "seq"])

    op.create_table(
        "checkpoints",
        sa.Column("seq", SEQ, autoincrement=True, nullable=False),
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("job_id", sa.String(length=64), nullable=False),
        sa.Column("step", sa.Integer(), nullable=False),
        sa.Column("epoch", sa.Integer(), nullable=False),
        sa.Column("blob_prefix", sa.String(length=512), nullable=False),
        sa.Column("valid_reward", sa.Double(), nullable=True),
        sa.Column("metrics", sa.JSON(), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("seq", name="pk_checkpoints"),
        sa.UniqueConstraint("id", name="uq_checkpoints_id"),
        sa.UniqueConstraint("job_id", "step", name="uq_checkpoints_job_id_step"),
    )
    op.create_index("ix_checkpoints_job_id_seq", "checkpoints", ["job_id", "seq"])

    op.create_table(
        "episode_servers",
        sa.Column("job_id", sa.String(length=64), nullable=False),
        sa.Column("secret", sa.String(length=64), nullable=False),
        sa.Column("epoch", sa.Integer(), nullable=False),
        sa.Column("url", sa.String(length=512), nullable=False),
        sa.PrimaryKeyConstraint("job_id", name="pk_episode_servers"),
    )

    op.create_table(
        "eval_journal",
        sa.Column("run_id", sa.String(length=64), nullable=False),
        sa.Column("line", sa.Integer(), nullable=False),
        sa.Column("part", sa.Integer(), nullable=False),
        sa.Column("data", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("run_id", "line", "part", name="pk_eval_journal"),
    )

    op.create_table(
        "eval_pages",
        sa.Column("run_id", sa.String(length=64), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("blob_key", sa.String(length=512), nullable=False),
        sa.Column("items", sa.Integer(), nullable=False),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
        sa.Column("sha256", sa.String(length=64), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("run_id", "number", name="pk_eval_pages"),
    )
    op.create_index("ix_eval_pages_blob_key", "eval_pages", ["blob_key"])

    op.create_table(
        "events",
        sa.Column("seq", SEQ, autoincrement=True, nullable=False),
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("job_id", sa.String(length=64), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("level", sa.String(length=8), nullable=False),
        sa.Column("type", sa.String(length=32), nullable=False),
        sa.Column("message", sa.Text(), nullable=False),
        sa.Column("data", sa.JSON(), nullable=False),
        sa.Column("step", sa.Integer(), nullable=True),
        sa.Column("superseded", sa.Boolean(), nullable=False),
        sa.PrimaryKeyConstraint("seq", name="pk_events"),
        sa.UniqueConstraint("id", name="uq_events_id"),
    )
    op.create_index("ix_events_job_id_seq", "events", ["job_id", "seq"])

    op.create_table(
        "golden_cases",
        sa.Column("seq", SEQ, autoincrement=True, nullable=False),
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("grader_id", sa.String(length=64), nullable=False),
        sa.Column("sha256", sa.String(length=64), nullable=False),
        sa.Column("sample", sa.JSON(), nullable=False),
        sa.Column("item", sa.JSON(), nullable=False),
        sa.Column("min_score", sa.Double(), nullable=True),
        sa.Column("max_score", sa.Double(), nullable=True),
        sa.Column("note", sa.String(length=1024), nullable=False),
        sa.Column("rollout_id", sa.String(length=128), nullable=True),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("seq", name="pk_golden_cases"),
        sa.UniqueConstraint("grader_id", "sha256", name="uq_golden_cases_grader_id_sha256"),
        sa.UniqueConstraint("id", name="uq_golden_cases_id"),
    )
    op.create_index("ix_golden_cases_grader_id_seq", "golden_cases", ["grader_id", "seq"])

    op.create_table(
        "grader_versions",
        sa.Column("seq", SEQ, autoincrement=True, nullable=False),
        sa.Column("grader_id", sa.String(length=64), nullable=False),
        sa.Column("version", sa.String(length=64), nullable=False),
        sa.Column("spec", sa.JSON(), nullable=False),
        sa.Column("note", sa.String(length=1024), nullable=False),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("audit", sa.JSON(), nullable=True),
        sa.PrimaryKeyConstraint("seq", name="pk_grader_versions"),
        sa.UniqueConstraint("grader_id", "version", name="uq_grader_versions_grader_id_version"),
    )
    op.create_index("ix_grader_versions_grader_id_seq", "grader_versions", ["grader_id", "seq"])

    op.create_table(
        "job_attempts",
        sa.Column("job_id", sa.String(length=64), nullable=False),
        sa.Column("epoch", sa.Integer(), nullable=False),
        sa.Column("kind", sa.String(length=16), nullable=False),
        sa.Column("worker", sa.String(length=128), nullable=False),
        sa.Column("started_at", sa.Double(), nullable=False),
        sa.Column("ended_at", sa.Double(), nullable=True),
        sa.Column("outcome", sa.String(length=16), nullable=True),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.Column("resumed_from", sa.Integer(), nullable=True),
        sa.PrimaryKeyConstraint("job_id", "epoch", name="pk_job_attempts"),
    )

    op.create_table(
        "organizations",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("name", sa.String(length=64), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_organizations"),
    )

    op.create_table(
        "past_cursors",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("owner", sa.String(length=64), nullable=False),
        sa.Column("seq", sa.BigInteger(), nullable=False),
        sa.Column("deleted_at", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_past_cursors"),
    )
    op.create_index("ix_past_cursors_deleted_at", "past_cursors", ["deleted_at"])

    op.create_table(
        "rollout_pages",
        sa.Column("job_id", sa.String(length=64), nullable=False),
        sa.Column("step", sa.Integer(), nullable=False),
        sa.Column("split", sa.String(length=8), nullable=False),
        sa.Column("epoch", sa.Integer(), nullable=False),
        sa.Column("blob_key", sa.String(length=512), nullable=False),
        sa.Column("samples", sa.Integer(), nullable=False),
        sa.Column("total", sa.Integer(), nullable=False),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
        sa.Column("summary", sa.JSON(), nullable=True),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("job_id", "step", "split", name="pk_rollout_pages"),
    )

    op.create_table(
        "scrub_rounds",
        sa.Column("id", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("started_at", sa.Double(), nullable=False),
        sa.Column("holder", sa.String(length=64), nullable=False),
        sa.Column("held_until", sa.Double(), nullable=False),
        sa.Column("file_seq", sa.BigInteger(), nullable=False),
        sa.Column("checkpoint_seq", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_scrub_rounds"),
    )

    op.create_table(
        "step_metrics",
        sa.Column("job_id", sa.String(length=64), nullable=False),
        sa.Column("step", sa.Integer(), nullable=False),
        sa.Column("epoch", sa.Integer(), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("data", sa.JSON(), nullable=False),
        sa.Column("valid_scores", sa.JSON(), nullable=True),
        sa.Column("shadow_scores", sa.JSON(), nullable=True),
        sa.PrimaryKeyConstraint("job_id", "step", name="pk_step_metrics"),
    )

    op.create_table(
        "upload_parts",
        sa.Column("seq", SEQ, autoincrement=True, nullable=False),
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("upload_id", sa.String(length=64), nullable=False),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
        sa.Column("blob_key", sa.String(length=512), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("seq", name="pk_upload_parts"),
        sa.UniqueConstraint("id", name="uq_upload_parts_id"),
    )
    op.create_index("ix_upload_parts_upload_id", "upload_parts", ["upload_id"])

    op.create_table(
        "webhook_deliveries",
        sa.Column("seq", SEQ, autoincrement=True, nullable=False),
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("endpoint_id", sa.String(length=64), nullable=False),
        sa.Column("job_id", sa.String(length=64), nullable=False),
        sa.Column("type", sa.String(length=64), nullable=False),
        sa.Column("body", sa.Text(), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("next_attempt_at", sa.Double(), nullable=False),
        sa.Column("settled", sa.Boolean(), nullable=False),
        sa.Column("delivered_at", sa.BigInteger(), nullable=True),
        sa.Column("last_status", sa.Integer(), nullable=True),
        sa.Column("last_error", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("seq", name="pk_webhook_deliveries"),
        sa.UniqueConstraint("id", name="uq_webhook_deliveries_id"),
    )
    op.create_index("ix_webhook_deliveries_endpoint_id", "webhook_deliveries", ["endpoint_id"])
    op.create_index(
        "ix_webhook_deliveries_settled_next_attempt_at", "webhook_deliveries", ["settled", "next_attempt_at"]
    )

    op.create_table(
        "workers",
        sa.Column("name", sa.String(length=128), nullable=False),
        sa.Column("host", sa.String(length=128), nullable=False),
        sa.Column("gpu_class", sa.String(length=32), nullable=False),
        sa.Column("version", sa.String(length=64), nullable=False),
        sa.Column("machines", sa.Integer(), nullable=False),
        sa.Column("ranks", sa.Integer(), nullable=False),
        sa.Column("gpus", sa.JSON(), nullable=False),
        sa.Column("memory_used_bytes", sa.BigInteger(), nullable=True),
        sa.Column("memory_total_bytes", sa.BigInteger(), nullable=True),
        sa.Column("draining", sa.Boolean(), nullable=False),
        sa.Column("findings", sa.JSON(), nullable=False),
        sa.Column("started_at", sa.Double(), nullable=False),
        sa.Column("seen_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_workers"),
    )
    op.create_index("ix_workers_seen_at", "workers", ["seen_at"])

    op.create_table(
        "projects",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("organization_id", sa.String(length=64), nullable=False),
        sa.Column("name", sa.String(length=64), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("limits", sa.JSON(), nullable=True),
        sa.Column("kueue", sa.JSON(), nullable=True),
        sa.Column("archived_at", sa.BigInteger(), nullable=True),
        sa.ForeignKeyConstraint(
            ["organization_id"], ["organizations.id"], name="fk_projects_organization_id"
        ),
        sa.PrimaryKeyConstraint("id", name="pk_projects"),
    )

    op.create_table(
        "project_turns",
        sa.Column("project_id", sa.String(length=64), nullable=False),
        sa.Column("last_turn", sa.BigInteger(), nullable=False),
        sa.Column("last_validation", sa.BigInteger(), nullable=False),
        sa.Column("last_eval_run", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name="fk_project_turns_project_id"),
        sa.PrimaryKeyConstraint("project_id", name="pk_project_turns"),
    )

    op.create_table(
        "api_keys",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("project_id", sa.String(length=64), nullable=False),
        sa.Column("name", sa.String(length=64), nullable=False),
        sa.Column("sha256", sa.String(length=64), nullable=False),
        sa.Column("last4", sa.String(length=4), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("scope", sa.String(length=8), nullable=False),
        sa.Column("owner", sa.String(length=128), nullable=False),
        sa.Column("expires_at", sa.BigInteger(), nullable=True),
        sa.Column("revoked_at", sa.BigInteger(), nullable=True),
        sa.Column("last_used_at", sa.BigInteger(), nullable=True),
        sa.Column("sso_user", sa.String(length=128), nullable=True),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name="fk_api_keys_project_id"),
        sa.PrimaryKeyConstraint("id", name="pk_api_keys"),
        sa.UniqueConstraint("sha256", name="uq_api_keys_sha256"),
    )

    op.create_table(
        "checkpoint_permissions",
        sa.Column("seq", SEQ, autoincrement=True, nullable=False),
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("model", sa.String(length=512), nullable=False),
        sa.Column("project_id", sa.String(length=64), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name="fk_checkpoint_permissions_project_id"),
        sa.PrimaryKeyConstraint("seq", name="pk_checkpoint_permissions"),
        sa.UniqueConstraint("id", name="uq_checkpoint_permissions_id"),
        sa.UniqueConstraint("model", "project_id", name="uq_checkpoint_permissions_model_project_id"),
    )
    op.create_index("ix_checkpoint_permissions_project_id", "checkpoint_permissions", ["project_id"])

    op.create_table(
        "eval_runs",
        sa.Column("seq", SEQ, autoincrement=True, nullable=False),
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("eval_id", sa.String(length=64), nullable=False),
        sa.Column("project_id", sa.String(length=64), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("name", sa.String(length=256), nullable=False),
        sa.Column("metadata", sa.JSON(), nullable=True),
        sa.Column("model", sa.String(length=512), nullable=True),
        sa.Column("data_source", sa.JSON(), nullable=False),
        sa.Column("content", sa.JSON(), nullable=True),
        sa.Column("content_bytes", sa.BigInteger(), nullable=False),
        sa.Column("file_id", sa.String(length=64), nullable=True),
        sa.Column("total", sa.Integer(), nullable=False),
        sa.Column("summary", sa.JSON(), nullable=False),
        sa.Column("budget", sa.JSON(), nullable=True),
        sa.Column("status", sa.String(length=16), nullable=False),
        sa.Column("error", sa.JSON(), nullable=True),
        sa.Column("started_at", sa.BigInteger(), nullable=True),
        sa.Column("finished_at", sa.BigInteger(), nullable=True),
        sa.Column("deleted_at", sa.BigInteger(), nullable=True),
        sa.Column("output_due", sa.Boolean(), nullable=False),
        sa.Column("epoch", sa.Integer(), nullable=False),
        sa.Column("failures", sa.Integer(), nullable=False),
        sa.Column("lost_workers", sa.Integer(), nullable=False),
        sa.Column("note", sa.String(length=256), nullable=True),
        sa.Column("unknown_since", sa.Double(), nullable=True),
        sa.Column("lease_owner", sa.String(length=128), nullable=True),
        sa.Column("lease_expires_at", sa.Double(), nullable=True),
        sa.Column("next_run_at", sa.Double(), nullable=False),
        sa.Column("dispatched_at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name="fk_eval_runs_project_id"),
        sa.PrimaryKeyConstraint("seq", name="pk_eval_runs"),
        sa.UniqueConstraint("id", name="uq_eval_runs_id"),
    )
    op.create_index("ix_eval_runs_deleted_at", "eval_runs", ["deleted_at"])
    op.create_index("ix_eval_runs_eval_id_seq", "eval_runs", ["eval_id", "seq"])
    op.create_index("ix_eval_runs_output_due", "eval_runs", ["output_due"])
    op.create_index("ix_eval_runs_status_project_id_seq", "eval_runs", ["status", "project_id", "seq"])

    op.create_table(
        "evals",
        sa.Column("seq", SEQ, autoincrement=True, nullable=False),
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("project_id", sa.String(length=64), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("updated_at", sa.BigInteger(), nullable=False),
        sa.Column("name", sa.String(length=256), nullable=False),
        sa.Column("metadata", sa.JSON(), nullable=True),
        sa.Column("data_source_config", sa.JSON(), nullable=False),
        sa.Column("testing_criteria", sa.JSON(), nullable=False),
        sa.Column("deleted_at", sa.BigInteger(), nullable=True),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name="fk_evals_project_id"),
        sa.PrimaryKeyConstraint("seq", name="pk_evals"),
        sa.UniqueConstraint("id", name="uq_evals_id"),
    )
    op.create_index("ix_evals_deleted_at", "evals", ["deleted_at"])
    op.create_index("ix_evals_project_id_created_at_seq", "evals", ["project_id", "created_at", "seq"])

    op.create_table(
        "files",
        sa.Column("seq", SEQ, autoincrement=True, nullable=False),
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("project_id", sa.String(length=64), nullable=False),
        sa.Column("filename", sa.String(length=512), nullable=False),
        sa.Column("purpose", sa.String(length=32), nullable=False),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
        sa.Column("sha256", sa.String(length=64), nullable=False),
        sa.Column("blob_key", sa.String(length=512), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("expires_at", sa.BigInteger(), nullable=True),
        sa.Column("deleted_at", sa.BigInteger(), nullable=True),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name="fk_files_project_id"),
        sa.PrimaryKeyConstraint("seq", name="pk_files"),
        sa.UniqueConstraint("id", name="uq_files_id"),
    )
    op.create_index("ix_files_deleted_at", "files", ["deleted_at"])
    op.create_index("ix_files_project_id_seq", "files", ["project_id", "seq"])
    op.create_index("ix_files_project_id_sha256", "files", ["project_id", "sha256"])

    op.create_table(
        "idempotent_requests",
        sa.Column("project_id", sa.String(length=64), nullable=False),
        sa.Column("key", sa.String(length=255), nullable=False),
        sa.Column("fingerprint", sa.String(length=64), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("status_code", sa.Integer(), nullable=False),
        sa.Column("answer", sa.JSON(), nullable=False),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name="fk_idempotent_requests_project_id"),
        sa.PrimaryKeyConstraint("project_id", "key", name="pk_idempotent_requests"),
    )
    op.create_index("ix_idempotent_requests_created_at", "idempotent_requests", ["created_at"])

    op.create_table(
        "jobs",
        sa.Column("seq", SEQ, autoincrement=True, nullable=False),
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("organization_id", sa.String(length=64), nullable=False),
        sa.Column("project_id", sa.String(length=64), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("model", sa.String(length=256), nullable=False),
        sa.Column("training_file", sa.String(length=64), nullable=False),
        sa.Column("validation_file", sa.String(length=64), nullable=True),
        sa.Column("suffix", sa.String(length=64), nullable=True),
        sa.Column("seed", sa.BigInteger(), nullable=False),
        sa.Column("metadata", sa.JSON(), nullable=True),
        sa.Column("method", sa.String(length=32), nullable=False),
        sa.Column("reinforcement", sa.JSON(), nullable=False),
        sa.Column("parent", sa.JSON(), nullable=True),
        sa.Column("status", sa.String(length=32), nullable=False),
        sa.Column("resolved", sa.JSON(), nullable=True),
        sa.Column("error", sa.JSON(), nullable=True),
        sa.Column("started_at", sa.BigInteger(), nullable=True),
        sa.Column("finished_at", sa.BigInteger(), nullable=True),
        sa.Column("estimated_finish", sa.BigInteger(), nullable=True),
        sa.Column("verdict", sa.JSON(), nullable=True),
        sa.Column("fine_tuned_model", sa.String(length=512), nullable=True),
        sa.Column("result_file", sa.String(length=64), nullable=True),
        sa.Column("trained_tokens", sa.BigInteger(), nullable=False),
        sa.Column("usage", sa.JSON(), nullable=True),
        sa.Column("budget", sa.JSON(), nullable=True),
        sa.Column("gpu_seconds", sa.Double(), nullable=False),
        sa.Column("gpu_class", sa.String(length=32), nullable=False),
        sa.Column("gpus", sa.Integer(), nullable=True),
        sa.Column("nodes", sa.Integer(), nullable=True),
        sa.Column("epoch", sa.Integer(), nullable=False),
        sa.Column("failures", sa.Integer(), nullable=False),
        sa.Column("lease_owner", sa.String(length=128), nullable=True),
        sa.Column("lease_expires_at", sa.Double(), nullable=True),
        sa.Column("next_run_at", sa.Double(), nullable=False),
        sa.Column("dispatched_at", sa.Double(), nullable=False),
        sa.Column("progress", sa.JSON(), nullable=True),
        sa.Column("pod", sa.JSON(), nullable=True),
        sa.Column("preview", sa.JSON(), nullable=True),
        sa.Column("memory", sa.JSON(), nullable=True),
        sa.ForeignKeyConstraint(["organization_id"], ["organizations.id"], name="fk_jobs_organization_id"),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name="fk_jobs_project_id"),
        sa.PrimaryKeyConstraint("seq", name="pk_jobs"),
        sa.UniqueConstraint("id", name="uq_jobs_id"),
    )
    op.create_index("ix_jobs_project_id_created_at_seq", "jobs", ["project_id", "created_at", "seq"])
    op.create_index("ix_jobs_project_id_seq", "jobs", ["project_id", "seq"])
    op.create_index(
        "ix_jobs_status_gpu_class_project_id_seq", "jobs", ["status", "gpu_class", "project_id", "seq"]
    )
    op.create_index("ix_jobs_status_lease_expires_at", "jobs", ["status", "lease_expires_at"])
    op.create_index("ix_jobs_status_project_id_seq", "jobs", ["status", "project_id", "seq"])

    op.create_table(
        "model_aliases",
        sa.Column("seq", SEQ, autoincrement=True, nullable=False),
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("project_id", sa.String(length=64), nullable=False),
        sa.Column("name", sa.String(length=64), nullable=False),
        sa.Column("model", sa.String(length=512), nullable=False),
        sa.Column("previous_model", sa.String(length=512), nullable=True),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("updated_at", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name="fk_model_aliases_project_id"),
        sa.PrimaryKeyConstraint("seq", name="pk_model_aliases"),
        sa.UniqueConstraint("id", name="uq_model_aliases_id"),
        sa.UniqueConstraint("project_id", "name", name="uq_model_aliases_project_id_name"),
    )
    op.create_index("ix_model_aliases_model", "model_aliases", ["model"])
    op.create_index("ix_model_aliases_project_id_seq", "model_aliases", ["project_id", "seq"])

    op.create_table(
        "memory_limits",
        sa.Column("model", sa.String(length=256), nullable=False),
        sa.Column("device", sa.String(length=128), nullable=False),
        sa.Column("workload", sa.String(length=128), nullable=False),
        sa.Column("sizes", sa.JSON(), nullable=False),
        sa.Column("updated_at", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("model", "device", "workload", name="pk_memory_limits"),
    )

    op.create_table(
        "model_usage",
        sa.Column("project_id", sa.String(length=64), nullable=False),
        sa.Column("day", sa.Integer(), nullable=False),
        sa.Column("model", sa.String(length=512), nullable=False),
        sa.Column("gpu_seconds", sa.Double(), nullable=False),
        sa.Column("sampled_tokens", sa.BigInteger(), nullable=False),
        sa.Column("unused_tokens", sa.BigInteger(), nullable=False),
        sa.Column("trained_tokens", sa.BigInteger(), nullable=False),
        sa.Column("grader_tokens", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name="fk_model_usage_project_id"),
        sa.PrimaryKeyConstraint("project_id", "day", "model", name="pk_model_usage"),
    )

    op.create_table(
        "pipelines",
        sa.Column("seq", SEQ, autoincrement=True, nullable=False),
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("project_id", sa.String(length=64), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("name", sa.String(length=256), nullable=True),
        sa.Column("metadata", sa.JSON(), nullable=True),
        sa.Column("actor", sa.String(length=64), nullable=False),
        sa.Column("cloned_from", sa.String(length=64), nullable=True),
        sa.Column("stages", sa.JSON(), nullable=False),
        sa.Column("status", sa.String(length=16), nullable=False),
        sa.Column("finished_at", sa.BigInteger(), nullable=True),
        sa.Column("epoch", sa.Integer(), nullable=False),
        sa.Column("lease_owner", sa.String(length=128), nullable=True),
        sa.Column("lease_expires_at", sa.Double(), nullable=True),
        sa.Column("next_run_at", sa.Double(), nullable=False),
        sa.Column("dispatched_at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name="fk_pipelines_project_id"),
        sa.PrimaryKeyConstraint("seq", name="pk_pipelines"),
        sa.UniqueConstraint("id", name="uq_pipelines_id"),
    )
    op.create_index("ix_pipelines_project_id_seq", "pipelines", ["project_id", "seq"])
    op.create_index("ix_pipelines_status_next_run_at", "pipelines", ["status", "next_run_at"])

    op.create_table(
        "grader_audits",
        sa.Column("seq", SEQ, autoincrement=True, nullable=False),
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("project_id", sa.String(length=64), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("finished_at", sa.BigInteger(), nullable=True),
        sa.Column("request", sa.JSON(), nullable=False),
        sa.Column("training_sha256", sa.String(length=64), nullable=False),
        sa.Column("version", sa.String(length=64), nullable=False),
        sa.Column("behavior_sha256", sa.String(length=64), nullable=False),
        sa.Column("status", sa.String(length=16), nullable=False),
        sa.Column("progress", sa.JSON(), nullable=False),
        sa.Column("report", sa.JSON(), nullable=True),
        sa.Column("error", sa.JSON(), nullable=True),
        sa.Column("lease_expires_at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name="fk_grader_audits_project_id"),
        sa.PrimaryKeyConstraint("seq", name="pk_grader_audits"),
        sa.UniqueConstraint("id", name="uq_grader_audits_id"),
    )
    op.create_index("ix_grader_audits_finished_at", "grader_audits", ["finished_at"])
    op.create_index("ix_grader_audits_project_id_seq", "grader_audits", ["project_id", "seq"])
    op.create_index(
        "ix_grader_audits_project_id_training_sha256", "grader_audits", ["project_id", "training_sha256"]
    )

    op.create_table(
        "previews",
        sa.Column("seq", SEQ, autoincrement=True, nullable=False),
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("project_id", sa.String(length=64), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("finished_at", sa.BigInteger(), nullable=True),
        sa.Column("request", sa.JSON(), nullable=False),
        sa.Column("parts", sa.JSON(), nullable=False),
        sa.Column("training_sha256", sa.String(length=64), nullable=False),
        sa.Column("status", sa.String(length=16), nullable=False),
        sa.Column("progress", sa.JSON(), nullable=False),
        sa.Column("report", sa.JSON(), nullable=True),
        sa.Column("error", sa.JSON(), nullable=True),
        sa.Column("measured", sa.JSON(), nullable=True),
        sa.Column("answers", sa.JSON(), nullable=True),
        sa.Column("lease_expires_at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name="fk_previews_project_id"),
        sa.PrimaryKeyConstraint("seq", name="pk_previews"),
        sa.UniqueConstraint("id", name="uq_previews_id"),
    )
    op.create_index("ix_previews_finished_at", "previews", ["finished_at"])
    op.create_index("ix_previews_project_id_seq", "previews", ["project_id", "seq"])
    op.create_index("ix_previews_project_id_training_sha256", "previews", ["project_id", "training_sha256"])

    op.create_table(
        "project_usage",
        sa.Column("project_id", sa.String(length=64), nullable=False),
        sa.Column("day", sa.Integer(), nullable=False),
        sa.Column("gpu_seconds", sa.Double(), nullable=False),
        sa.Column("grader_tokens", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name="fk_project_usage_project_id"),
        sa.PrimaryKeyConstraint("project_id", "day", name="pk_project_usage"),
    )

    op.create_table(
        "stored_graders",
        sa.Column("seq", SEQ, autoincrement=True, nullable=False),
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("project_id", sa.String(length=64), nullable=False),
        sa.Column("name", sa.String(length=64), nullable=False),
        sa.Column("version", sa.String(length=64), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("updated_at", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name="fk_stored_graders_project_id"),
        sa.PrimaryKeyConstraint("seq", name="pk_stored_graders"),
        sa.UniqueConstraint("id", name="uq_stored_graders_id"),
        sa.UniqueConstraint("project_id", "name", name="uq_stored_graders_project_id_name"),
    )
    op.create_index("ix_stored_graders_project_id_seq", "stored_graders", ["project_id", "seq"])

    op.create_table(
        "tuned_models",
        sa.Column("seq", SEQ, autoincrement=True, nullable=False),
        sa.Column("name", sa.String(length=512), nullable=False),
        sa.Column("project_id", sa.String(length=64), nullable=False),
        sa.Column("job_id", sa.String(length=64), nullable=False),
        sa.Column("checkpoint_id", sa.String(length=64), nullable=False),
        sa.Column("base_model", sa.String(length=256), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name="fk_tuned_models_project_id"),
        sa.PrimaryKeyConstraint("seq", name="pk_tuned_models"),
        sa.UniqueConstraint("name", name="uq_tuned_models_name"),
    )
    op.create_index("ix_tuned_models_job_id", "tuned_models", ["job_id"])
    op.create_index("ix_tuned_models_project_id_seq", "tuned_models", ["project_id", "seq"])

    op.create_table(
        "uploads",
        sa.Column("seq", SEQ, autoincrement=True, nullable=False),
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("project_id", sa.String(length=64), nullable=False),
        sa.Column("filename", sa.String(length=512), nullable=False),
        sa.Column("purpose", sa.String(length=32), nullable=False),
        sa.Column("mime_type", sa.String(length=128), nullable=False),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
        sa.Column("status", sa.String(length=16), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("expires_at", sa.BigInteger(), nullable=False),
        sa.Column("file_expires_after", sa.BigInteger(), nullable=True),
        sa.Column("file_id", sa.String(length=64), nullable=True),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name="fk_uploads_project_id"),
        sa.PrimaryKeyConstraint("seq", name="pk_uploads"),
        sa.UniqueConstraint("id", name="uq_uploads_id"),
    )
    op.create_index("ix_uploads_status_expires_at", "uploads", ["status", "expires_at"])

    op.create_table(
        "webhook_endpoints",
        sa.Column("seq", SEQ, autoincrement=True, nullable=False),
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("project_id", sa.String(length=64), nullable=False),
        sa.Column("name", sa.String(length=128), nullable=False),
        sa.Column("url", sa.String(length=2048), nullable=False),
        sa.Column("event_types", sa.JSON(), nullable=False),
        sa.Column("thresholds", sa.JSON(), nullable=True),
        sa.Column("secret", sa.String(length=128), nullable=False),
        sa.Column("old_secret", sa.String(length=128), nullable=True),
        sa.Column("old_secret_until", sa.BigInteger(), nullable=True),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("updated_at", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name="fk_webhook_endpoints_project_id"),
        sa.PrimaryKeyConstraint("seq", name="pk_webhook_endpoints"),
        sa.UniqueConstraint("id", name="uq_webhook_endpoints_id"),
    )
    op.create_index("ix_webhook_endpoints_project_id_seq", "webhook_endpoints", ["project_id", "seq"])

    op.create_table(
        "console_sessions",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("kind", sa.String(length=8), nullable=False),
        sa.Column("sha256", sa.String(length=64), nullable=False),
        sa.Column("key_id", sa.String(length=64), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("created_ns", sa.BigInteger(), nullable=False),
        sa.Column("expires_at", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["key_id"], ["api_keys.id"], name="fk_console_sessions_key_id"),
        sa.PrimaryKeyConstraint("id", name="pk_console_sessions"),
        sa.UniqueConstraint("sha256", name="uq_console_sessions_sha256"),
    )


def downgrade() -> None:
    op.drop_table("console_sessions")
    op.drop_table("webhook_endpoints")
    op.drop_table("uploads")
    op.drop_table("tuned_models")
    op.drop_table("stored_graders")
    op.drop_table("project_usage")
    op.drop_table("project_turns")
    op.drop_table("previews")
    op.drop_table("grader_audits")
    op.drop_table("pipelines")
    op.drop_table("model_usage")
    op.drop_table("memory_limits")
    op.drop_table("model_aliases")
    op.drop_table("jobs")
    op.drop_table("idempotent_requests")
    op.drop_table("files")
    op.drop_table("evals")
    op.drop_table("eval_runs")
    op.drop_table("checkpoint_permissions")
    op.drop_table("api_keys")
    op.drop_table("projects")
    op.drop_table("workers")
    op.drop_table("webhook_deliveries")
    op.drop_table("upload_parts")
    op.drop_table("step_metrics")
    op.drop_table("scrub_rounds")
    op.drop_table("rollout_pages")
    op.drop_table("past_cursors")
    op.drop_table("organizations")
    op.drop_table("job_attempts")
    op.drop_table("grader_versions")
    op.drop_table("golden_cases")
    op.drop_table("events")
    op.drop_table("eval_pages")
    op.drop_table("eval_journal")
    op.drop_table("episode_servers")
    op.drop_table("checkpoints")
    op.drop_table("audit_entries")
