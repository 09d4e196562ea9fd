"""Previews are stored, and jobs show the one of their request."""

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None

SEQ = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.create_table(
        "previews",
        sa.Column("seq", SEQ, autoincrement=True, nullable=False),
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("project_id", sa.String(64), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("finished_at", sa.BigInteger()),
        sa.Column("request", sa.JSON(), nullable=False),
        sa.Column("parts", sa.JSON(), nullable=False),
        sa.Column("training_sha256", sa.String(64), nullable=False),
        sa.Column("status", sa.String(16), nullable=False),
        sa.Column("progress", sa.JSON(), nullable=False),
        sa.Column("report", sa.JSON()),
        sa.Column("error", sa.JSON()),
        sa.Column("measured", sa.JSON()),
        sa.Column("answers", sa.JSON()),
        sa.Column("lease_expires_at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name="fk_previews_project_id"),
        sa.PrimaryKeyConstraint("seq", name="pk_previews"),
        sa.UniqueConstraint("id", name="uq_previews_id"),
    )
    op.create_index("ix_previews_project_id_seq", "previews", ["project_id", "seq"])
    op.create_index("ix_previews_project_id_training_sha256", "previews", ["project_id", "training_sha256"])
    op.create_index("ix_previews_finished_at", "previews", ["finished_at"])
    op.add_column("jobs", sa.Column("preview", sa.JSON()))


def downgrade() -> None:
    op.drop_column("jobs", "preview")
    op.drop_table("previews")
