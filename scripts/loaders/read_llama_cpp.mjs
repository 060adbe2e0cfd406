// Log-probabilities by llama.cpp: node read_llama_cpp.mjs CHECKPOINTS OUT.json, beside node-llama-cpp.
// Each FAMILY/FORM/model.gguf is read in a context of its own, float32 cache, no flash attention.
import fs from "node:fs";
import path from "node:path";
import {getLlama} from "node-llama-cpp";

const [folder, output] = process.argv.slice(2);
const ids = JSON.parse(fs.readFileSync(path.join(folder, "ids.json"), "utf8"));
const llama = await getLlama({build: "never", gpu: false, maxThreads: 1, logLevel: "error"});
const found = {};
for (const family of fs.readdirSync(folder).sort()) {
    if (!fs.statSync(path.join(folder, family)).isDirectory()) continue;
    for (const form of fs.readdirSync(path.join(folder, family)).sort()) {
        const file = path.join(folder, family, form, "model.gguf");
        if (!fs.existsSync(file)) continue;
        const name = `${family}/${form}`;
        try {
            const model = await llama.loadModel({modelPath: file, gpuLayers: 0});
            const context = await model.createContext({
                contextSize: ids.length, batchSize: ids.length, threads: 1, flashAttention: false,
                experimentalKvCacheKeyType: "F32", experimentalKvCacheValueType: "F32",
            });
            const sequence = context.getSequence();
            const ask = {generateNext: {probabilities: true}};
            const answers = await sequence.controlledEvaluate(ids.map((id) => [id, ask]));
            found[name] = ids.slice(1).map((id, at) => Math.log(answers[at].next.probabilities.get(id) ?? NaN));
            await context.dispose();
            await model.dispose();
        } catch (error) {
            found[`${name}/error`] = String(error).slice(0, 2000);
        }
        console.log(name, found[`${name}/error`] ?? found[name].slice(0, 2));
        fs.writeFileSync(output, JSON.stringify(found));
    }
}
process.exit(0);
