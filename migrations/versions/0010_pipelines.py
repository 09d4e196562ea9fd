"""Pipelines of stages."""

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None

SEQ = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.create_table(
        "pipelines",
        sa.Column("seq", SEQ, autoincrement=True, nullable=False),
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("project_id", sa.String(64), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("name", sa.String(256)),
        sa.Column("metadata", sa.JSON()),
        sa.Column("actor", sa.String(64), nullable=False),
        sa.Column("cloned_from", sa.String(64)),
        sa.Column("stages", sa.JSON(), nullable=False),
        sa.Column("status", sa.String(16), nullable=False),
        sa.Column("finished_at", sa.BigInteger()),
        sa.Column("epoch", sa.Integer(), nullable=False),
        sa.Column("held_until", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name="fk_pipelines_project_id"),
        sa.PrimaryKeyConstraint("seq", name="pk_pipelines"),
        sa.UniqueConstraint("id", name="uq_pipelines_id"),
    )
    op.create_index("ix_pipelines_project_id_seq", "pipelines", ["project_id", "seq"])
    op.create_index("ix_pipelines_status_held_until", "pipelines", ["status", "held_until"])


def downgrade() -> None:
    op.drop_table("pipelines")
