"""Keys of users of single sign-on, and usage of models with long names."""

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0014"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("api_keys", sa.Column("sso_user", sa.String(128)))
    with op.batch_alter_table("model_usage") as usage:
        usage.alter_column(
            "model", type_=sa.String(512), existing_type=sa.String(256), existing_nullable=False
        )


def downgrade() -> None:
    with op.batch_alter_table("model_usage") as usage:
        usage.alter_column(
            "model", type_=sa.String(256), existing_type=sa.String(512), existing_nullable=False
        )
    op.drop_column("api_keys", "sso_user")
