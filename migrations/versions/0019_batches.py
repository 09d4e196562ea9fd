"""Whether a batch has ended and lacks its files."""

import sqlalchemy as sa
from alembic import op

revision = "0019"
down_revision = "0018"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column(
        "eval_runs", sa.Column("output_due", sa.Boolean(), nullable=False, server_default=sa.false())
    )
    op.create_index(op.f("ix_eval_runs_output_due"), "eval_runs", ["output_due"])


def downgrade() -> None:
    op.drop_index(op.f("ix_eval_runs_output_due"), "eval_runs")
    op.drop_column("eval_runs", "output_due")
