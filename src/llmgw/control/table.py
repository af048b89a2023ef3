"""The routing table, made anew for the models of which something changed, and numbered."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from llmgw.cluster.catalog import Catalog
from llmgw.cluster.derived import routes
from llmgw.cluster.model import Cluster, Replica, Route
from llmgw.link.messages import RoutesKey
from llmgw.store.base import ApiKey

VERSIONS_PER_EPOCH = 1_000_000
"""Table versions of one leader; a later leader's are all higher, so a gateway can tell which table is newer."""


class Table:
    """What gateways go by: ``routes``, ``keys``, and ``replicas``, the ids that they may send to by it."""

    def __init__(self, epoch: int) -> None:
        self.routes: tuple[Route, ...] = ()
        self.keys: tuple[RoutesKey, ...] = ()
        self.replicas: frozenset[str] = frozenset()
        self._epoch = epoch
        self._made = 0
        self._of_model: dict[str, Route] = {}
        self._stale: set[str] = set()
        self._seen: tuple[object, ...] = ()
        self._seen_keys: object = None

    @property
    def version(self) -> int:
        return self._epoch * VERSIONS_PER_EPOCH + self._made

    def follow(self, cluster: Cluster, api_keys: Mapping[str, ApiKey], models: Iterable[str]) -> bool:
        """Make the table follow the cluster, in which only ``models`` changed. True where it is another one now."""
        self._stale |= {*models, *self._all_if_needed(cluster)}
        is_new = self._made == 0
        if self._stale:
            is_new |= self._remake(cluster)
        if api_keys is not self._seen_keys:
            keys = _keys(api_keys)
            is_new |= keys != self.keys
            self.keys, self._seen_keys = keys, api_keys
        self._made += is_new
        return is_new

    def _all_if_needed(self, cluster: Cluster) -> set[str]:
        """All models, where something changed that each route depends on."""
        seen = (cluster.catalog, cluster.scale, cluster.halting)
        if self._seen and all(a is b for a, b in zip(seen, self._seen, strict=True)):
            return set()
        self._seen = seen
        return {spec.name for spec in cluster.catalog.models} | self._of_model.keys()

    def _remake(self, cluster: Cluster) -> bool:
        replicas: dict[str, dict[str, Replica]] = {model: {} for model in self._stale}
        for replica_id, replica in cluster.replicas.items():
            if replica.model in replicas:
                replicas[replica.model][replica_id] = replica
        before = dict(self._of_model)
        for model, its in replicas.items():
            route = _route(cluster, model, its)
            if route is None:
                self._of_model.pop(model, None)
            else:
                self._of_model[model] = route
        self._stale.clear()
        if self._of_model == before:
            return False
        self.routes = tuple(route for _, route in sorted(self._of_model.items()))
        self.replicas = frozenset(endpoint.replica for route in self.routes for endpoint in route.endpoints)
        return True


def _route(cluster: Cluster, model: str, replicas: Mapping[str, Replica]) -> Route | None:
    spec = cluster.catalog.model(model)
    # A model that has left the catalog and still runs must not answer to a name that another one has now.
    catalog = cluster.catalog if spec is None else Catalog(models=(spec,), engines=cluster.catalog.engines)
    found = routes(replace(cluster, catalog=catalog, replicas=replicas))
    return next((route for route in found if route.model == model), None)


def _keys(keys: Mapping[str, ApiKey]) -> tuple[RoutesKey, ...]:
    return tuple(
        RoutesKey(id=key.id, hash=key.hash, models=key.models) for key in keys.values() if key.revoked_at is None
    )
