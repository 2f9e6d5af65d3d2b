"""Keys may have a list of their own of hosts that their runs may ask for."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("keys", sa.Column("net", sa.Text(), nullable=True))


def downgrade() -> None:
    op.drop_column("keys", "net")
