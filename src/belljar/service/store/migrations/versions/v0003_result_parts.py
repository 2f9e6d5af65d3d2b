"""Large results lie outside the row of their run, in parts."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("runs", sa.Column("result_parts", sa.Integer(), nullable=False, server_default="0"))
    op.create_table(
        "result_parts",
        sa.Column("container_id", sa.Text(), nullable=False),
        sa.Column("number", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("part", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("container_id", "number"),
    )


def downgrade() -> None:
    op.drop_table("result_parts")
    op.drop_column("runs", "result_parts")
