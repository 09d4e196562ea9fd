"""Progress of the scrub round over all objects."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
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


def downgrade() -> None:
    op.drop_table("scrub_rounds")
