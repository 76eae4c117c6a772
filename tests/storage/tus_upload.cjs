// Upload a file with tus-js-client: `node tus_upload.cjs '{"endpoint": …}'`. Prints the URL of the upload.
const fs = require("node:fs");
const tus = require("./vendor/tus-js-client/tus.node.cjs");

const { endpoint, token, path, metadata, parallelUploads, retryDelays } = JSON.parse(process.argv[2]);
const upload = new tus.Upload(fs.createReadStream(path), {
  endpoint,
  retryDelays,
  metadata,
  parallelUploads,
  headers: { Authorization: `Token ${token}` },
  onError: (error) => {
    console.error(String(error));
    process.exit(1);
  },
  onSuccess: () => console.log(upload.url),
});
upload.start();
