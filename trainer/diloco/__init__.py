"""DiLoCo: many inner steps on each node, then one outer step all nodes agree on."""
