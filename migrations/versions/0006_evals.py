"""Evals that users create, their runs, and the items of the runs."""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

# SQLite autoincrements only a column declared INTEGER.
SEQ = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.add_column("projects", sa.Column("last_eval_run", sa.BigInteger(), server_default="0", nullable=False))
    op.create_index("ix_jobs_project_id_created_at_seq", "jobs", ["project_id", "created_at", "seq"])
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
    op.create_index("ix_evals_project_id_created_at_seq", "evals", ["project_id", "created_at", "seq"])
    op.create_index("ix_evals_deleted_at", "evals", ["deleted_at"])
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
        sa.Column("status", sa.String(length=16), nullable=False),
        sa.Column("error", sa.JSON(), nullable=True),
        sa.Column("started_at", sa.BigInteger(), nullable=True),
        sa.Column("finished_at", sa.BigInteger(), nullable=True),
        sa.Column("deleted_at", sa.BigInteger(), nullable=True),
        sa.Column("epoch", sa.Integer(), nullable=False),
        sa.Column("failures", sa.Integer(), nullable=False),
        sa.Column("lease_owner", sa.String(length=128), nullable=True),
        sa.Column("lease_expires_at", sa.Double(), nullable=True),
        sa.Column("next_run_at", sa.Double(), nullable=False),
        sa.Column("dispatched_at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name="fk_eval_runs_project_id"),
        sa.PrimaryKeyConstraint("seq", name="pk_eval_runs"),
        sa.UniqueConstraint("id", name="uq_eval_runs_id"),
    )
    op.create_index("ix_eval_runs_eval_id_seq", "eval_runs", ["eval_id", "seq"])
    op.create_index("ix_eval_runs_status_project_id_seq", "eval_runs", ["status", "project_id", "seq"])
    op.create_index("ix_eval_runs_deleted_at", "eval_runs", ["deleted_at"])
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
        "eval_journal",
        sa.Column("run_id", sa.String(length=64), nullable=False),
        sa.Column("line", sa.Integer(), nullable=False),
        sa.Column("data", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("run_id", "line", name="pk_eval_journal"),
    )


def downgrade() -> None:
    for table in ("eval_journal", "eval_pages", "eval_runs", "evals"):
        op.drop_table(table)
    op.drop_index("ix_jobs_project_id_created_at_seq", table_name="jobs")
    op.drop_column("projects", "last_eval_run")
