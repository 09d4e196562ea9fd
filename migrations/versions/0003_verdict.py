"""The verdict of a job, and the row scores of its validations."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("jobs", sa.Column("verdict", sa.JSON(), nullable=True))
    op.add_column("step_metrics", sa.Column("valid_scores", sa.JSON(), nullable=True))


def downgrade() -> None:
    op.drop_column("step_metrics", "valid_scores")
    op.drop_column("jobs", "verdict")
