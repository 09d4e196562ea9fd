"""The method of a job, whose object is in the column `reinforcement`, and the tuned model that it trains further."""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("jobs", sa.Column("method", sa.String(32), nullable=False, server_default="reinforcement"))
    op.add_column("jobs", sa.Column("parent", sa.JSON(), nullable=True))


def downgrade() -> None:
    op.drop_column("jobs", "parent")
    op.drop_column("jobs", "method")
