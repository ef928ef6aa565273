//! Redis: alone, with replica and sentinels, as a cluster.
