"""Budgets of eval runs."""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("eval_runs", sa.Column("budget", sa.JSON(), nullable=True))


def downgrade() -> None:
    op.drop_column("eval_runs", "budget")
