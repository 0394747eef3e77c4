// The store's page: looks at the store again and again, and draws what has changed.

import { announce, byId, chip, poll, show } from "./dom.js";
import { colourSources, isReport, readOverview } from "./store_data.js";
import { drawOverview } from "./store_overview.js";
import { onOpenDocuments, refreshGrid } from "./store_shards.js";
import { offerSamples, offerSources, onLookUp, openFirst, openShardDocuments } from "./store_documents.js";
import { drawVocabulary, lookUpToken } from "./store_vocabulary.js";

const INTERVAL_MS = 2000;

let drawnIndex = "";
let sequence = null;

async function look() {
  const store = await readOverview();
  colourSources(store.sources.map(source => source.name));
  drawOverview(store);
  if (store.state !== "ready") return;
  drawVocabulary(store);
  offerSources(store.sources.filter(source => source.shards > 0).map(source => source.name));
  if (sequence !== null && sequence !== store.sequence) announce(`commit ${store.sequence}: ${store.totals.shards} shards`);
  sequence = store.sequence;
  const { indexed_shards: indexed, verified_shards: verified, damaged_shards: damaged } = store.index;
  const index = JSON.stringify([store.published_sequence, indexed, verified, damaged]);
  if (index !== drawnIndex) {
    await refreshGrid();
    drawnIndex = index;
    if (!isReport && indexed > 0) openFirst();
  }
}

onOpenDocuments(openShardDocuments);
onLookUp(lookUpToken);
if (isReport) {
  look().then(offerSamples);
} else {
  poll(look, {
    intervalMs: INTERVAL_MS,
    onFailure: error => show(byId("states"), chip("bad", `the server does not answer: ${error.message}`)),
  });
}
