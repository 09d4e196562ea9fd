"""Attempts, budgets, scoped keys, project limits and usage, audit log, idempotency, multipart uploads, webhooks."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

# SQLite autoincrements only a column declared INTEGER.
SEQ = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    # Required new columns have a default in the database, so that the previous version of the service can still write
    # rows during the upgrade.
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
        "project_usage",
        sa.Column("project_id", sa.String(length=64), nullable=False),
        sa.Column("day", sa.Integer(), nullable=False),
        sa.Column("gpu_seconds", sa.Double(), nullable=False),
        sa.Column("grader_tokens", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name="fk_project_usage_project_id"),
        sa.PrimaryKeyConstraint("project_id", "day", name="pk_project_usage"),
    )
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
    op.add_column("api_keys", sa.Column("scope", sa.String(length=8), nullable=False, server_default="admin"))
    op.add_column("api_keys", sa.Column("owner", sa.String(length=128), nullable=False, server_default=""))
    op.add_column("api_keys", sa.Column("expires_at", sa.BigInteger(), nullable=True))
    op.add_column("api_keys", sa.Column("revoked_at", sa.BigInteger(), nullable=True))
    op.add_column("api_keys", sa.Column("last_used_at", sa.BigInteger(), nullable=True))
    op.add_column("jobs", sa.Column("budget", sa.JSON(), nullable=True))
    op.add_column("jobs", sa.Column("gpu_seconds", sa.Double(), nullable=False, server_default="0"))
    op.add_column("jobs", sa.Column("progress_at", sa.Double(), nullable=True))
    op.add_column("events", sa.Column("step", sa.Integer(), nullable=True))
    op.add_column("events", sa.Column("superseded", sa.Boolean(), nullable=False, server_default=sa.false()))
    op.add_column("rollout_pages", sa.Column("total", sa.Integer(), nullable=False, server_default="0"))
    op.add_column("rollout_pages", sa.Column("bytes", sa.BigInteger(), nullable=False, server_default="0"))
    op.add_column("rollout_pages", sa.Column("summary", sa.JSON(), nullable=True))
    op.add_column("projects", sa.Column("limits", sa.JSON(), nullable=True))
    op.add_column("projects", sa.Column("last_turn", sa.BigInteger(), nullable=False, server_default="0"))
    op.add_column(
        "projects", sa.Column("last_validation", sa.BigInteger(), nullable=False, server_default="0")
    )
    op.add_column("projects", sa.Column("archived_at", sa.BigInteger(), nullable=True))
    op.create_index(
        "ix_jobs_status_gpu_class_project_id_seq", "jobs", ["status", "gpu_class", "project_id", "seq"]
    )
    op.drop_index("ix_jobs_status_gpu_class", table_name="jobs")  # a prefix of the new index


def downgrade() -> None:
    # The first version ignores scopes and expiry, so the remaining keys would have full access forever.
    op.execute(
        "delete from api_keys where scope <> 'admin' or revoked_at is not null or expires_at is not null "
        "or project_id in (select id from projects where archived_at is not null)"
    )
    # The first version does not know superseded events.
    op.execute("delete from events where superseded")
    op.create_index("ix_jobs_status_gpu_class", "jobs", ["status", "gpu_class"])
    op.drop_index("ix_jobs_status_gpu_class_project_id_seq", table_name="jobs")
    op.drop_column("projects", "archived_at")
    op.drop_column("projects", "last_validation")
    op.drop_column("projects", "last_turn")
    op.drop_column("projects", "limits")
    op.drop_column("rollout_pages", "summary")
    op.drop_column("rollout_pages", "bytes")
    op.drop_column("rollout_pages", "total")
    op.drop_column("events", "superseded")
    op.drop_column("events", "step")
    op.drop_column("jobs", "progress_at")
    op.drop_column("jobs", "gpu_seconds")
    op.drop_column("jobs", "budget")
    op.drop_column("api_keys", "last_used_at")
    op.drop_column("api_keys", "revoked_at")
    op.drop_column("api_keys", "expires_at")
    op.drop_column("api_keys", "owner")
    op.drop_column("api_keys", "scope")
    op.drop_index("ix_webhook_endpoints_project_id_seq", table_name="webhook_endpoints")
    op.drop_table("webhook_endpoints")
    op.drop_index("ix_uploads_status_expires_at", table_name="uploads")
    op.drop_table("uploads")
    op.drop_table("project_usage")
    op.drop_index("ix_idempotent_requests_created_at", table_name="idempotent_requests")
    op.drop_table("idempotent_requests")
    op.drop_index("ix_webhook_deliveries_settled_next_attempt_at", table_name="webhook_deliveries")
    op.drop_index("ix_webhook_deliveries_endpoint_id", table_name="webhook_deliveries")
    op.drop_table("webhook_deliveries")
    op.drop_index("ix_upload_parts_upload_id", table_name="upload_parts")
    op.drop_table("upload_parts")
    op.drop_table("job_attempts")
    op.drop_index("ix_audit_entries_project_id_seq", table_name="audit_entries")
    op.drop_table("audit_entries")
