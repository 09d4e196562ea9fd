"""What an eval run waits for, and how many workers it has lost."""

import sqlalchemy as sa
from alembic import op

revision = "0018"
down_revision = "0017"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("eval_runs", sa.Column("lost_workers", sa.Integer(), nullable=False, server_default="0"))
    op.add_column("eval_runs", sa.Column("note", sa.String(256)))


def downgrade() -> None:
    op.drop_column("eval_runs", "note")
    op.drop_column("eval_runs", "lost_workers")
