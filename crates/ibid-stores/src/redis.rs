//! Redis: alone, behind sentinels, or as a cluster.
