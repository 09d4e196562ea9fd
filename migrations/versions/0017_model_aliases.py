"""Names that a project gives to models."""

import sqlalchemy as sa
from alembic import op

revision = "0017"
down_revision = "0016"
branch_labels = None
depends_on = None

SEQ = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.create_table(
        "model_aliases",
        sa.Column("seq", SEQ, autoincrement=True, nullable=False),
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("project_id", sa.String(64), nullable=False),
        sa.Column("name", sa.String(64), nullable=False),
        sa.Column("model", sa.String(512), nullable=False),
        sa.Column("previous_model", sa.String(512)),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("updated_at", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name="fk_model_aliases_project_id"),
        sa.PrimaryKeyConstraint("seq", name="pk_model_aliases"),
        sa.UniqueConstraint("id", name="uq_model_aliases_id"),
        sa.UniqueConstraint("project_id", "name", name="uq_model_aliases_project_id_name"),
    )
    op.create_index("ix_model_aliases_project_id_seq", "model_aliases", ["project_id", "seq"])
    op.create_index("ix_model_aliases_model", "model_aliases", ["model"])


def downgrade() -> None:
    op.drop_table("model_aliases")
