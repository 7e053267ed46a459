"""What the page of an asset says before it is ever materialized."""

import dagster as dg

from pipelines.deployment import Deployment


def described(deployment: Deployment, spec: dg.AssetSpec) -> dg.AssetSpec:
    """Return the spec with owners and tags."""
    return spec.replace_attributes(owners=deployment.owners, tags={**spec.tags, **deployment.tags})
