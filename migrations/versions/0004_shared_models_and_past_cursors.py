"""Permissions to use a tuned model of another project, and positions of deleted rows in their lists."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

# SQLite autoincrements only a column declared INTEGER.
SEQ = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
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


def downgrade() -> None:
    op.drop_index("ix_checkpoint_permissions_project_id", table_name="checkpoint_permissions")
    op.drop_table("checkpoint_permissions")
    op.drop_index("ix_past_cursors_deleted_at", table_name="past_cursors")
    op.drop_table("past_cursors")
