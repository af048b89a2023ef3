"""The control plane's shell: sessions, the reconcile loop, the admin API. It observes, persists and carries out."""
