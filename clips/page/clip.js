// One clip.

import { call } from "../js/api.js";
import { follow } from "../js/follow.js";
import { Submission } from "../js/submission.js";

export const STAGES = [
  ["audio", "speech"],
  ["image", "portrait"],
  ["video", "video"],
  ["clip", "check"],
];

export class Clip extends Submission {
  // `asked`: recipe, deadlineMs, onDeadline.
  constructor(asked) {
    super("/v2/slots", "clip", asked);
    this.percents = {};
    this.predictedMs = null;
    this.facts = null;
    this.outputs = {};
  }

  // A file of it, as a Blob.
  async file(name) {
    return (await call("GET", this.outputs[name])).blob();
  }

  body() {
    const { asked } = this;
    return {
      recipe: asked.recipe,
      deadline_ms: asked.deadlineMs,
      on_deadline: asked.onDeadline,
      outputs: ["mp4", "wav", "png"],
      on_disconnect: "cancel",
    };
  }

  accepted(answer) {
    this.predictedMs = answer.predicted_ms;
    return answer.slot_id;
  }

  follow() {
    return follow(`/v2/slots/${this.id}/events`, this, (event) => this.#take(event));
  }

  #take({ event, data }) {
    switch (event) {
      case "queued":
        this.queuePosition = data.queue_position;
        break;
      case "stage":
        this.stage = "running";
        this.percents[data.stage] = data.percent;
        break;
      case "result":
      case "error":
        this.#ended(data, event === "error" ? data : null);
        return;
      default:
        return;
    }
    this.tell();
  }

  #ended(told, error) {
    this.outcome = told.outcome;
    this.facts = told.seconds === undefined ? null : told;
    this.outputs = told.outputs ?? {};
    this.error = error;
    this.over();
  }
}
